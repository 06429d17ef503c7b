"""``trainloop.tabular`` beside AutoGluon's tabular package: the same models, rows, CPUs and time.

AutoGluon needs an environment of its own, since it pins other versions::

    python -m venv /tmp/ag-env
    /tmp/ag-env/bin/pip install torch 'autogluon.tabular[lightgbm]'
    python -m benchmarks.tabular --beside /tmp/ag-env/bin/python --sets breast_cancer made

Each fit runs in a process of its own, one after the other. The CPU seconds of all its processes come from the kernel;
on a machine that others use too, they tell more than seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETS = ("breast_cancer", "wine", "digits", "diabetes", "made", "made_numbers")


def table(name: str) -> Any:
    """A table with the label ``class``."""
    import numpy as np
    import pandas as pd

    if name in ("breast_cancer", "wine", "digits", "diabetes"):
        from sklearn import datasets

        frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
        return frame.rename(columns={"target": "class"})
    # As forest covers are: numbers, many categories, gaps, dates, text.
    rng = np.random.default_rng(0)
    rows = 3000
    height, slope = rng.normal(2800, 300, rows), rng.gamma(2, 7, rows)
    soil, area = rng.integers(0, 30, rows), rng.choice(["north", "south", "east", "west"], rows, p=[0.4, 0.3, 0.2, 0.1])
    days = pd.Timestamp("2023-01-01") + pd.to_timedelta(rng.integers(0, 700, rows), unit="D")
    words = np.array("dry wet old young dense open rocky sandy burnt green".split())
    chosen = rng.integers(0, 10, (rows, 4))
    worth = (height - 2800) / 300 + 0.05 * slope + np.sin(soil) + (area == "north") - (chosen == 8).sum(1)
    worth = worth + 0.4 * np.cos(2 * np.pi * days.dayofyear / 365) + rng.normal(0, 0.6, rows)
    frame = pd.DataFrame({"height": height, "slope": slope, "soil": [f"type {s}" for s in soil], "area": area})
    if name == "made_numbers":
        return frame.assign(**{"class": worth})
    frame["day"] = days
    frame["note"] = [" ".join(["it is", *words[row], "here"]) for row in chosen]
    frame["class"] = pd.cut(worth, [-np.inf, -0.5, 0.5, 1.5, np.inf], labels=["a", "b", "c", "d"]).astype(str)
    for column in ("height", "slope", "soil", "area", "day", "note"):
        frame.loc[rng.choice(rows, rows // 12, replace=False), column] = None
    return frame


def one(name: str, folds: int, num_cpus: int, split: int) -> dict[str, Any]:
    """Fit and score, with the package of this interpreter."""
    data = table(name)
    test = data.sample(frac=0.25, random_state=split)
    train = data.drop(test.index)
    hyperparameters = {"LR": {}, "RF": {}, "XT": {}, "GBM": {}, "NN_TORCH": {}}
    began = time.monotonic(), cpu_seconds()
    try:
        from autogluon.tabular import TabularPredictor

        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"num_bag_folds": folds, "num_stack_levels": 0, "dynamic_stacking": False}
            options["ag_args_ensemble"] = {"fold_fitting_strategy": "sequential_local"}
            predictor = TabularPredictor(label="class", path=folder, verbosity=0)
            began = time.monotonic(), cpu_seconds()
            predictor.fit(train, hyperparameters=hyperparameters, num_cpus=num_cpus, **(options if folds else {}))
            found = outcome(predictor, test, began)
    except ImportError:
        from trainloop.tabular import TabularPredictor as Own

        own = Own(label="class")
        began = time.monotonic(), cpu_seconds()
        own.fit(train, hyperparameters=hyperparameters, num_cpus=num_cpus, num_bag_folds=folds, verbosity=0)
        found = outcome(own, test, began)
    return found


def outcome(predictor: Any, test: Any, began: tuple[float, float]) -> dict[str, Any]:
    seconds, cpu = time.monotonic() - began[0], cpu_seconds() - began[1]
    metric = "root_mean_squared_error" if predictor.problem_type == "regression" else "accuracy"
    scores = predictor.evaluate(test)
    return {"score": float(scores[metric]), "metric": metric, "seconds": seconds, "cpu_seconds": cpu}


def cpu_seconds() -> float:
    """Of this process, and of all its descendants that have ended and were waited for."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def watched(command: list[str], environment: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run it; and the most CPUs that it and all its descendants used over any two seconds, counted by the kernel."""
    import psutil

    most, seen = 0.0, []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = psutil.Popen(command, env=environment, stdout=out, stderr=err)
        while process.poll() is None:
            seen.append((time.monotonic(), used_by(process)))
            while seen[-1][0] - seen[0][0] > 2:
                then, before = seen.pop(0)
                most = max(most, (seen[-1][1] - before) / (seen[-1][0] - then))
            time.sleep(0.1)
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(command, process.returncode, *texts), most


def used_by(process: Any) -> float:
    """CPU seconds of a process, of its descendants, and of those of them that ended and were waited for."""
    import psutil

    total = 0.0
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return total
    for each in family:
        try:
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
        except psutil.Error:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", help="the interpreter that has AutoGluon")
    parser.add_argument("--only", choices=("trainloop", "autogluon"))
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--splits", nargs="*", type=int, default=[1], help="seeds of the rows that are held out")
    parser.add_argument("--to", help="a file to append each run to, as a line of JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n" + json.dumps(one(args.one, args.folds, args.cpus, args.splits[0])))
        return
    interpreters = {"trainloop": sys.executable, **({"autogluon": args.beside} if args.beside else {})}
    print(
        f"{args.cpus} CPUs, {args.folds} folds\n{'data':<14} {'split':<5} {'package':<10} {'score':>9} {'seconds':>8} "
        f"{'CPU s':>7} {'CPUs':>5}"
    )
    for name, split in ((name, split) for name in args.sets for split in args.splits):
        for package, python in interpreters.items():
            if args.only not in (None, package):
                continue
            command = [python, str(Path(__file__).resolve()), "--one", name, "--splits", str(split)]
            command += ["--folds", str(args.folds), "--cpus", str(args.cpus)]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
            run, most = watched(command, environment)
            if run.returncode:
                print(f"{name:<14} {split:<5} {package:<10} failed: {run.stderr.strip().splitlines()[-1]}")
                continue
            found = {**json.loads(run.stdout.strip().splitlines()[-1]), "most_cpus": most}
            figures = f"{found['score']:>9.4f} {found['seconds']:>8.1f} {found['cpu_seconds']:>7.1f} {most:>5.2f}"
            print(f"{name:<14} {split:<5} {package:<10} {figures}  {found['metric']}", flush=True)
            if args.to:
                line = {"data": name, "split": split, "package": package, "folds": args.folds, "cpus": args.cpus}
                with open(args.to, "a") as file:
                    file.write(json.dumps({**line, **found}) + "\n")


if __name__ == "__main__":
    main()
