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


def one(name: str, folds: int, num_cpus: int) -> dict[str, Any]:
    """Fit and score, with the package of this interpreter."""
    data = table(name)
    test = data.sample(frac=0.25, random_state=1)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", help="the interpreter that has AutoGluon")
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n" + json.dumps(one(args.one, args.folds, args.cpus)))
        return
    interpreters = {"trainloop": sys.executable, **({"autogluon": args.beside} if args.beside else {})}
    print(
        f"{args.cpus} CPUs, {args.folds} folds\n{'data':<14} {'package':<10} {'score':>9} {'seconds':>8} {'CPU s':>7}"
    )
    for name in args.sets:
        for package, python in interpreters.items():
            command = [python, str(Path(__file__).resolve()), "--one", name]
            command += ["--folds", str(args.folds), "--cpus", str(args.cpus)]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if run.returncode:
                print(f"{name:<14} {package:<10} failed: {run.stderr.strip().splitlines()[-1]}")
                continue
            found = json.loads(run.stdout.strip().splitlines()[-1])
            figures = f"{found['score']:>9.4f} {found['seconds']:>8.1f} {found['cpu_seconds']:>7.1f}"
            print(f"{name:<14} {package:<10} {figures}  {found['metric']}", flush=True)


if __name__ == "__main__":
    main()
