"""Searches with real folds: scores, resumption, folds that fail, searches that are interrupted, CPUs and threads."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from kit.descriptors import all_low_numbers_taken
from kit.loops import cpu_loop
from kit.places import IMPORTS
from kit.programs import run_script, wait_until
from kit.saved_names import NAMES, names_in
from kit.tuning_kinds import MakeBusy, MakeFailing, Scaled, make_broken, make_frequencies, make_scaled, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainloop._launch.script.settings import read_settings, write_settings
from trainloop.resources import ResourceQuota, lease
from trainloop.tuning import BaggedPredictor, tune

Q = ResourceQuota
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinities and process groups of Linux")
two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    if "slow" in request.keywords:
        faulthandler.dump_traceback_later(280, exit=True)  # in place of pytest's, which ends it with the test


def search(make_loop: Callable[..., Any], space: dict[str, Any], **changed: Any) -> Any:
    options = {"searcher": "grid", "num_trials": 9, "num_bag_folds": 2, "data": rows(), "seed": 0, "progress": False}
    return tune(make_loop, space, **{**options, **changed})


def test_a_search_finds_the_best_and_its_bag_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = rows()
    found = search(make_scaled, {"scale": [0.0, 0.5]}, storage=tmp_path / "search", progress=True)
    assert (found.best_params, found.best_score) == ({"scale": 0.5}, 0.0)
    assert [trial.state for trial in found.trials] == ["done", "done"]
    assert all(trial.seconds > 0 for trial in found.trials)
    # each row is predicted by the model that did not train on it, in the order of the data
    assert found.out_of_fold_predictions.tolist() == (x[:, 0] / 2).tolist()
    assert found.predict(x).tolist() == y.tolist()
    held = [fold.validation for fold in found.folds]
    means = [model.mean for model in found.predictor.models]
    assert means == [np.delete(y, rows_).mean() for rows_ in held]
    found.predictor.save(tmp_path / "bag")
    assert BaggedPredictor.load(tmp_path / "bag").predict(x).tolist() == y.tolist()
    (tmp_path / "result").write_bytes(pickle.dumps(found))
    files = [
        tmp_path / "bag",
        tmp_path / "result",
        *(tmp_path / "search" / "trial-0001").rglob("*.pkl"),
        tmp_path / "search" / "folds.pkl",
    ]
    assert set().union(*map(names_in, files)) <= NAMES, "add the names: files of this version refer to them"
    # a beaten trial keeps its scores, not its models
    assert len(list((tmp_path / "search").glob("trial-*/fold-*/result.pkl"))) == 4
    assert len(list((tmp_path / "search" / "trial-0000").glob("fold-*/model.pkl"))) == 0
    assert "2 of 2 trials done, 0 running, 0 failed" in capsys.readouterr().err


@pytest.mark.long
def test_a_fold_has_the_settings_of_the_process_that_searches() -> None:
    def make_loop(params: dict[str, Any], fold: Any) -> Scaled:
        assert (torch.ones(1).dtype, np.geterr()["under"], torch.are_deterministic_algorithms_enabled()) == expected
        return Scaled(0.5)

    expected = (torch.float64, "raise", True)
    before = read_settings()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        with np.errstate(under="raise"):
            found = search(make_loop, {"scale": [0.5]})
    finally:
        write_settings(before)
    assert not found.best_trial.errors


@pytest.mark.long
def test_without_a_storage_the_files_last_as_long_as_the_result() -> None:
    found = search(lambda params, fold: Scaled(0.5), {}, num_bag_folds=3, num_trials=4)
    assert len(found.trials) == 1
    folder = found.folder
    assert (folder / "trial-0000" / "fold-2" / "model.pkl").exists()
    del found
    assert not folder.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "do, error",
    [
        ("raise", "ValueError: this fold raises"),
        (
            "kill",
            "killed by signal SIGKILL, which the system sends when memory runs out.\nIts last output:\nabout to kill",
        ),
        pytest.param(
            *("orphan", "ended with exit code 7, without a result.\nIts last output:\nabout to orphan"),
            marks=pytest.mark.slow,
        ),
        pytest.param("exit", "SystemExit: 3", marks=pytest.mark.slow),
    ],
)
def test_a_fold_that_fails_is_lost_alone_and_trained_again_by_the_next_search(
    do: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    make = MakeFailing(marks)
    options: dict[str, Any] = {"storage": tmp_path / "search", "num_bag_folds": 3}
    found = search(make, {"do": [do, "nothing"]}, progress=True, **options)
    assert f"tune: fold 1 of trial 0 failed: {'The fold' if 'xit code' in error or 'killed' in error else error}" in (
        capsys.readouterr().err
    )
    lost, whole = found.trials
    assert (lost.state, whole.state) == ("partial", "done")
    assert [score is None for score in lost.scores] == [False, True, False]
    assert list(lost.errors) == [1]
    assert error in lost.errors[1]
    assert whole.scores == [0.0] * 3
    # a best trial of parts has holes in its out-of-fold predictions
    found.trials.remove(whole)
    assert np.isnan(found.out_of_fold_predictions).sum() == len(found.folds[1].validation)
    assert np.isfinite(found.predict(rows()[0])).all()
    # the next search trains what is missing, and nothing else
    again = search(make, {"do": [do, "nothing"]}, **options)
    assert [trial.state for trial in again.trials] == ["done", "done"]
    runs = sorted(path.name for path in marks.iterdir())
    assert runs == sorted([f"{do}-0-0", f"{do}-1-0", f"{do}-1-1", f"{do}-2-0", *(f"nothing-{k}-0" for k in range(3))])
    assert again.out_of_fold_predictions.tolist() == rows()[1].tolist()


@pytest.mark.long
def test_folds_that_are_forks_end_as_others_do(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    space = {"do": ["kill", "orphan", "raise", "nothing"]}
    found = search(MakeFailing(marks), space, num_trials=4, preload=["numpy", "no_such_module"])
    assert [trial.state for trial in found.trials] == ["partial"] * 3 + ["done"]
    errors = [trial.errors.get(1, "") for trial in found.trials]
    killed = "killed by signal SIGKILL, which the system sends when memory runs out.\nIts last output:\nabout to kill"
    assert killed in errors[0]
    assert "ended with exit code 7, without a result.\nIts last output:\nabout to orphan" in errors[1]
    assert "ValueError: this fold raises" in errors[2]
    assert found.out_of_fold_predictions.tolist() == rows()[1].tolist()
    assert all(trial.cpus == found.plan.per_model.num_cpus for trial in found.trials)
    # each in a process of its own, of which nothing is left
    pids = [int(path.read_text()) for path in marks.iterdir()]
    assert len(set(pids)) == len(pids) == 8
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.fixture
def no_server() -> Iterator[None]:
    """The test's own server: those of other tests have imported other modules."""
    kill_server()
    yield
    kill_server()


def kill_server() -> None:
    if (pid := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.long
def test_a_search_outlives_the_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_server: None) -> None:
    """It is killed while a fold trains; or it exits at an import."""
    marks = tmp_path / "marks"
    marks.mkdir()
    options: dict[str, Any] = {"total": Q(num_cpus=1), "num_trials": 3}
    space = {"do": ["nothing", "kill the parent", "raise"]}
    found = search(MakeFailing(marks), space, preload=["numpy"], **options)
    assert [trial.state for trial in found.trials] == ["done", "partial", "partial"]
    assert found.trials[1].errors[1].startswith("The fold was stopped because the fork server")
    assert "about to kill the parent" in found.trials[1].errors[1]
    assert "ValueError: this fold raises" in found.trials[2].errors[1]
    pids = [int(path.read_text()) for path in marks.iterdir()]
    assert len(pids) == 6
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exits_at_import.py").write_text("import os\nos._exit(5)\n")
    scales = {"scale": [0.0, 0.5]}
    kill_server()
    with pytest.warns(
        UserWarning, match="from now on, models start in fresh interpreters.*exits_at_import.*the server ended"
    ) as told:
        found = search(make_scaled, scales, preload=["exits_at_import"], **options)
    assert len(told) == 1
    assert [trial.state for trial in found.trials] == ["done"] * 2

    # as LightGBM without its OpenMP: no ImportError
    (tmp_path / "lacks_a_library.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = search(make_scaled, scales, preload=["lacks_a_library", "numpy"], **options)
    assert [trial.state for trial in found.trials] == ["done"] * 2


class Parents(Scaled):
    """Reports the parent of its process, and what that had imported."""

    def fit(self, x: Any, y: Any) -> None:
        super().fit(x, y)
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            print(os.getppid(), "multiprocessing.forkserver" in file.read(), "wave" in sys.modules)


def make_parents(params: dict[str, Any], fold: Any) -> Parents:
    return Parents(**params)


@pytest.mark.long
def test_models_are_forks_of_one_process_that_has_imported_their_modules(tmp_path: Path, no_server: None) -> None:
    logs = {}
    for name, preload in {"forks": ["wave"], "fresh": []}.items():
        found = search(make_parents, {"scale": [0.0, 0.5]}, storage=tmp_path / name, preload=preload)
        assert [trial.state for trial in found.trials] == ["done"] * 2
        logs[name] = {path.read_text() for path in (tmp_path / name).rglob("log.txt")}
    assert logs["fresh"] == {f"{os.getpid()} False False\n"}
    assert logs["forks"] == {f"{forkserver._forkserver._forkserver_pid} True True\n"}  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_class_of_one_row_and_a_process_with_many_open_files() -> None:
    x, y = np.zeros((21, 1)), np.array(["a"] * 10 + ["b"] + ["c"] * 10)
    with all_low_numbers_taken():
        found = search(make_frequencies, {"any": [0]}, data=(x, y), preload=["numpy"])
    assert [trial.state for trial in found.trials] == ["done"], found.trials[0].errors
    by_fold = [np.array([(y[fold.train] == label).mean() for label in "abc"]) for fold in found.folds]
    for fold, chances, score in zip(found.folds, by_fold, found.trials[0].scores):
        np.testing.assert_allclose(found.out_of_fold_predictions[fold.validation], [chances] * len(fold.validation))
        own = np.maximum(chances[["abc".index(label) for label in y[fold.validation]]], 1e-15)
        assert score == pytest.approx(-np.log(own).mean())
    assert sorted(chances[1] for chances in by_fold)[0] == 0.0  # one fold has not seen it
    np.testing.assert_allclose(found.predict(x), [np.mean(by_fold, axis=0)] * 21)


OPTIONS = """
import numpy as np
import model, options
from options import OPTIONS
from trainloop.tuning import tune

class Options:
    def set(self, scale):
        OPTIONS["scale"] = scale

def search():
    same, options.FILE = options.OPTIONS, open(__file__)  # a file can't be sent
    def make(params, fold):
        same.update(scale=2.0) if params["by"] == "outer variable" else Options().set(3.0)
        return model.Scaled()
    data = np.ones((8, 1)), np.full(8, 3.0)
    found = tune(make, {"by": ["outer variable", "class"]}, searcher="grid", num_trials=2, num_bag_folds=2, data=data,
                 metric=lambda y, p: float(abs(y - p).max()), mode="min", progress=False)
    print([trial.scores for trial in found.trials], *found.trials[0].errors.values())

if __name__ == "__main__":
    search()
"""
MODEL = """
from options import OPTIONS

class Scaled:
    def fit(self, *rows):
        self.scale = OPTIONS["scale"]

    def predict(self, x):
        return self.scale * x[:, 0]
"""


@pytest.mark.long
def test_a_models_module_sees_what_the_script_writes_into_an_object_of_both(tmp_path: Path) -> None:
    done = run_script(tmp_path, OPTIONS, modules={"model": MODEL, "options": "OPTIONS = {'scale': 0.0}"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[1.0, 1.0], [0.0, 0.0]]\n"


RUN = """
import sys
from pathlib import Path
from kit.tuning_kinds import MakeFailing, rows
from trainloop.resources import ResourceQuota
from trainloop.tuning import tune
marks = Path(sys.argv[1])
found = tune(MakeFailing(marks), {"do": ["hang", "nothing"]}, searcher="grid", num_trials=2, num_bag_folds=2, seed=0,
             data=rows(), total=ResourceQuota(num_cpus=2), storage=marks.parent / "search",
             progress=False, preload=sys.argv[2:])
print([trial.state for trial in found.trials], [list(trial.errors) for trial in found.trials], found.interrupted)
print(found.trials[0].errors.get(1))
"""


REST = ("trial-0000/fold-0", "trial-0001/fold-0", "trial-0001/fold-1")


@pytest.mark.long
@two_cpus
@pytest.mark.parametrize(
    "end, preload",
    [
        (signal.SIGINT, []),
        (signal.SIGKILL, ["numpy"]),
        pytest.param(signal.SIGKILL, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, ["numpy"], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.slow),
    ],
)
def test_a_search_that_is_ended_leaves_no_process_and_goes_on_later(
    end: int, preload: list[str], tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(marks), *preload],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": IMPORTS},
    )
    try:
        # Two folds train at once: while one hangs, the other place takes all that there is besides.
        rest = [tmp_path / "search" / place / "result.pkl" for place in REST]
        wait_until(lambda: (marks / "hang-1-0").exists() and all(path.exists() for path in rest), run)
        hanging = psutil.Process(int((marks / "hang-1-0").read_text()))
        run.send_signal(end)
        output, errors = run.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
    if end == signal.SIGINT:  # what there is comes back
        assert run.returncode == 0, errors
        assert output.splitlines()[0] == "['interrupted', 'done'] [[1], []] True"
        assert "interrupted while this fold trained" in output
    psutil.wait_procs([hanging], timeout=30)
    assert not hanging.is_running()
    found = search(MakeFailing(marks), {"do": ["hang", "nothing"]}, num_trials=2, storage=tmp_path / "search")
    assert [trial.state for trial in found.trials] == ["done", "done"]
    runs = sorted(path.name for path in marks.iterdir())
    assert runs == ["hang-0-0", "hang-1-0", "hang-1-1", "nothing-0-0", "nothing-1-0"]


class Watch(threading.Thread):
    """Counts the runnable threads of all folds together, and reads their affinities, again and again."""

    def __init__(self, marks: Path) -> None:
        super().__init__(name="watch")
        self.marks = marks
        self.samples: list[tuple[int, int, list[frozenset[int]]]] = []
        """Folds, their runnable threads, and their affinities, at one time."""
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            pids = []
            for mark in self.marks.glob("fold-?"):
                try:
                    pids.append(int(mark.read_text()))
                except (OSError, ValueError):
                    continue
            try:
                affinities = [frozenset(os.sched_getaffinity(pid)) for pid in pids]
                self.samples.append((len(pids), sum(map(runnable_threads, pids)), affinities))
            except OSError:
                continue


def runnable_threads(pid: int) -> int:
    number = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        number += state == "R"
    return number


@pytest.mark.long
@two_cpus
def test_folds_keep_to_their_cpus_and_their_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    marks = tmp_path / "marks"
    marks.mkdir()
    watch = Watch(marks)
    watch.start()
    try:
        found = search(MakeBusy(marks, 1.5), {"a": [0]}, num_bag_folds=4, total=Q(2, 0), num_trials=1)
    finally:
        watch.over.set()
        watch.join()
    assert [trial.state for trial in found.trials] == ["done"]
    assert (found.plan.folds_in_parallel, found.plan.per_model.num_cpus) == (2, 1)
    together = [sample for sample in watch.samples if sample[0] == 2]
    assert len(together) > 5, "two folds were never seen together"
    assert max(folds for folds, _, _ in watch.samples) == 2
    # the plan's two, and no more than one above for each fold
    assert max(threads for _, threads, _ in together) <= 2 + 2
    assert sorted(threads for _, threads, _ in together)[len(together) // 2] <= 2
    for _, _, affinities in together:
        assert all(len(cpus) == 1 for cpus in affinities)
        assert not affinities[0] & affinities[1]


@two_cpus
def test_a_search_waits_for_other_runs_or_gives_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainloop.errors import ResourceError

    everything = [f"cpu-{cpu}" for cpu in sorted(os.sched_getaffinity(0))]
    with lease.acquire({"cpu": lease.Request(1, everything)}, timeout_s=0):
        with pytest.raises(ResourceError, match=r"could not be leased within 0\.2 s"):
            search(make_scaled, {"scale": [0.5]}, lease_timeout_s=0.2)
        assert "tune is waiting for other runs" in capsys.readouterr().err
        with pytest.raises(ResourceError, match="could not be leased at once"):
            search(make_scaled, {"scale": [0.5]}, lease_timeout_s=0)
        # what fits beside the other run starts at once
        found = search(make_scaled, {"scale": [0.5]}, total=Q(1, 0), lease_timeout_s=0, num_bag_folds=2)
    assert found.best_score == 0


# -- TrainLoop and estimators ----------------------------------------------------------------------------------------


def net(width: int) -> nn.Module:
    from trainloop import TTBasicModel

    class Net(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
            x, y = batch_data
            return self(x.to(device)).softmax(1), y, {}

    return Net()


def blobs(length: int = 61) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def make_either(params: dict[str, Any], fold: Any) -> Any:
    """A ``TrainLoop``, or scikit-learn's model on the same rows."""
    from trainloop import TrainLoop

    x, y = blobs()
    if params["kind"] == "linear":
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression()
    data = TensorDataset(x, y)
    model = net(params["width"])
    train = Subset(data, fold.train) if fold is not None else data
    held_out = Subset(data, fold.validation) if fold is not None else data
    return TrainLoop(
        model,
        DataLoader(train, batch_size=8, shuffle=True),
        DataLoader(held_out, batch_size=8),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        criterion=nn.CrossEntropyLoss(),
        progress_bar=False,
    )


@pytest.mark.slow
def test_a_train_loop_and_scikit_learn_in_one_search(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    x, y = blobs()
    options: dict[str, Any] = {"data": (x.numpy(), y.numpy()), "fit_args": None, "num_trials": 2}
    space = {"kind": ["net", "linear"], "width": [8], "num_epochs": [4]}
    found = search(make_either, space, storage=tmp_path / "search", **options)
    assert [trial.state for trial in found.trials] == ["done", "done"], [trial.errors for trial in found.trials]
    assert all(0 < trial.score < 0.7 for trial in found.trials)
    assert found.out_of_fold_predictions.shape == (61, 2)
    for trial in list(found.trials):
        if trial is not found.best_trial:
            continue
        data = TensorDataset(x, y) if trial.params["kind"] == "net" else x.numpy()
        assert (found.predict(data).argmax(1) == y.numpy()).mean() > 0.85
    # the same seed gives the same scores
    assert [trial.scores for trial in search(make_either, space, **options).trials] == [t.scores for t in found.trials]


def make_ranks(params: dict[str, Any], fold: Any) -> Any:

    data = TensorDataset(*blobs())
    torch.manual_seed(fold.index)  # the same weights in both trials, whose seeds differ
    model = net(8)
    return cpu_loop(
        model,
        DataLoader(Subset(data, fold.train), batch_size=4, shuffle=True),
        torch.optim.Adam(model.parameters(), lr=0.05),
        validation_loader=DataLoader(Subset(data, fold.validation), batch_size=8),
        gpu_mode=params["mode"],
        devices=2,
        seed=0,
    )


@pytest.mark.slow
@two_cpus
def test_a_fold_may_be_ranks_itself(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": None, "targets": blobs()[1], "per_model": Q(2), "fit_args": {"num_epochs": 3}}
    found = search(make_ranks, {"mode": ["ddp", "fsdp"]}, total=Q(2, 0), **options)
    assert [trial.state for trial in found.trials] == ["done", "done"], [trial.errors for trial in found.trials]
    assert found.trials[1].scores == pytest.approx(found.trials[0].scores, rel=1e-4)
    assert found.plan.models_in_parallel == 1
    assert found.best_score < 0.65
    assert found.out_of_fold_predictions.shape == (61, 2)


@pytest.mark.slow
def test_the_rows_are_learnt_from_the_loop_where_nobody_tells(tmp_path: Path) -> None:
    space = {"kind": ["net"], "width": [4], "num_epochs": [1]}
    found = search(make_either, space, data=None, storage=tmp_path / "search", num_trials=1)
    assert sum(len(fold.validation) for fold in found.folds) == 61
    classes = blobs()[1].numpy()
    shares = [classes[fold.validation].mean() for fold in found.folds]
    assert abs(shares[0] - shares[1]) < 0.05  # stratified
    assert found.predict(TensorDataset(*blobs())).shape == (61, 2)


def test_a_loop_that_cannot_be_made_is_told_before_the_search() -> None:
    from trainloop.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=r"with a fold of two rows.*(?s:.*)no data here"):
        search(make_broken, {"a": [1]}, data=None)
