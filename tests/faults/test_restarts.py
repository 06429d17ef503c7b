"""Runs that survive failures: whatever is done to a rank, the run ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import same
from kit.loops import Layers, cpu_loop
from kit.small_loop import Raises
from kit.survival import LOADERS, Plan, SoftError, rows, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, checkpoint
from trainloop.callbacks import ModelCheckpoint, Profiler
from trainloop.checkpoint import file
from trainloop.errors import ConfigurationError, WorkerFailedError

Undisturbed = Callable[..., Any]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The facts of a run of today's kind, without restarts, made once for each kind."""
    made: dict[Any, Any] = {}

    def get(mode: str, ranks: int, kind: str, seed: int | None) -> Any:
        key = (mode, ranks, kind, seed)
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("undisturbed"), mode, ranks, kind, [], seed)[1]
        return made[key]

    return get


def linear_loop(batch_size: int) -> TrainLoop:
    """A loop of one layer over a few rows, in one process."""
    model = Layers(nn.Linear(6, 3))
    return cpu_loop(model, DataLoader(TensorDataset(*rows()), batch_size))


def assert_survives(
    undisturbed: Undisturbed,
    folder: Path,
    mode: str,
    ranks: int,
    kind: str,
    plan: list[Plan],
    seed: int | None = 3,
    in_order: bool = True,
    **fit: Any,
) -> Any:
    """Each planned strike was survived, and nothing of it can be seen afterwards."""
    expected = undisturbed(mode, ranks, kind, seed)
    tl, facts = train(folder, mode, ranks, kind, plan, seed, **{"max_restarts": -1, "restart_every_steps": 3, **fit})
    if in_order:
        assert [restart.rank for restart in tl.restarts] == [rank for rank, *_ in plan], tl.restarts
    else:  # two ranks may be struck at once, which is one failure
        assert len(plan) / 2 < len(tl.restarts) <= len(plan), tl.restarts
    assert [name for name in facts if not same(facts[name], expected[name])] == []
    return tl.restarts


@pytest.mark.long
def test_two_ranks_survive(undisturbed: Undisturbed, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = [
        (0, "on_train_begin", 0, "exits"),
        (1, "on_batch_end", 4, "SIGKILL"),
        (0, "restart checkpoint is half written", 6, "SIGKILL"),
        (1, "on_train_end", 16, "raises"),
    ]
    restarts = assert_survives(undisturbed, tmp_path, "ddp", 2, "workers", plan)
    assert [restart.step for restart in restarts] == sorted(restart.step for restart in restarts)
    assert all(0 <= restart.steps_repeated <= 3 and restart.seconds > 0 for restart in restarts)
    assert restarts[1].cause == "was killed by signal SIGKILL"
    assert restarts[-1].cause == "raised SoftError: by plan"
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trainloop: rank ")]
    assert len(lines) == len(plan)
    assert "training was resumed from step 3 (" in lines[1]


@pytest.mark.long
def test_one_process_survives_without_a_seed(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Twice in one epoch, whose order was drawn from the caller's generator; which is at the same place afterwards."""
    plan = [(0, "on_batch_end", 4, "SIGSEGV"), (0, "on_batch_end", 5, "SIGKILL"), (0, "at exit", 16, "SIGKILL")]
    assert_survives(undisturbed, tmp_path, "single", 1, "rows", plan, seed=None)


@pytest.mark.long
def test_persistent_workers_are_replaced(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Those that train, and those that validate: in the second epoch and between two, the others load the same."""
    plan = [
        (0, "on_epoch_begin", 8, "SIGKILL"),
        (0, "on_batch_end", 11, "SIGSEGV"),
        (0, "on_evaluation_begin", 16, "raises"),
    ]
    assert_survives(undisturbed, tmp_path, "single", 1, "workers", plan, seed=3, restart_every_steps=1)


NO_CHECKPOINT = "ignore:max_restarts. no checkpoint could be written after step"


@pytest.mark.long
@pytest.mark.filterwarnings(NO_CHECKPOINT)
def test_a_checkpoint_that_could_not_be_written(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The one before is taken, and the next one is written."""
    plan = [
        (0, "restart checkpoint is half written", 6, "out of memory"),
        (0, "on_batch_begin", 6, "SIGKILL"),
        (0, "on_epoch_end", 8, "raises"),
    ]
    tl, facts = train(tmp_path, "single", 1, "rows", plan, None, max_restarts=-1, restart_every_steps=1)
    expected = undisturbed("single", 1, "rows", None)
    assert [restart.step for restart in tl.restarts] == [5, 8]
    assert [name for name in facts if not same(facts[name], expected[name])] == []


@pytest.mark.long
@pytest.mark.filterwarnings(NO_CHECKPOINT)
def test_a_checkpoint_that_failed_is_tried_again_soon() -> None:
    """A step later, then 3 and 7 steps later, however long the pause is; then the pause counts again."""
    tl = linear_loop(batch_size=2)
    tries = Tries(fails_at=(20, 21, 24), dies_at=38)
    tl.fit(num_epochs=1, callbacks=[tries], max_restarts=1, restart_every_steps=20)
    assert tries.steps[:4] == [20, 21, 24, 31]  # as the last of them saw it
    assert [restart.step for restart in tl.restarts] == [31]


@pytest.mark.long
@pytest.mark.filterwarnings(NO_CHECKPOINT)
def test_sharded_ranks_stay_together_where_one_writes_no_checkpoint(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """While its state is taken, on either rank, and while rank 0 writes."""
    plan = [
        (1, "state_dict", 2, "out of memory"),
        (0, "state_dict", 3, "out of memory"),
        (0, "restart checkpoint is half written", 6, "out of memory"),
        (1, "on_batch_end", 7, "SIGKILL"),
    ]
    fit = {"max_restarts": -1, "restart_every_steps": 1}
    tl, facts = train(tmp_path, "fsdp", 2, "in memory", plan, **fit)
    expected = undisturbed("fsdp", 2, "in memory", 3)
    assert all((tmp_path / f"done-{i}").exists() for i in range(len(plan)))
    assert [(restart.rank, restart.cause) for restart in tl.restarts] == [(1, "was killed by signal SIGKILL")]
    assert [name for name in facts if not same(facts[name], expected[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), [("single", 1), ("ddp", 2)])
def test_the_last_epoch_is_finished(tmp_path: Path, mode: str, ranks: int) -> None:
    """Where iterations are counted: by a restart, and a resumed checkpoint, after the last of them."""
    length: dict[str, Any] = {"num_iterations": 10}  # within the second epoch, and with a checkpoint
    _, expected = train(tmp_path / "undisturbed", mode, ranks, "rows", [], **length)
    validates = (ranks - 1, "on_evaluation_begin", 10, "raises")
    tl, facts = train(
        tmp_path / "restarted", mode, ranks, "rows", [validates], **length, max_restarts=1, restart_every_steps=1
    )
    assert [restart.step for restart in tl.restarts] == [10]
    assert [name for name in facts if not same(facts[name], expected[name])] == []

    with pytest.raises((SoftError, WorkerFailedError)):
        train(tmp_path / "resumed", mode, ranks, "rows", [validates], **length)
    _, facts = train(tmp_path / "resumed", mode, ranks, "rows", [validates], **length, resume_from="last")
    names = ("weights", "optimizer", "history", "early stopping", "average", "schedule", "counters")
    assert [name for name in names if not same(facts[name], expected[name])] == []


@pytest.mark.long
def test_sigterm_in_a_restart(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The run ends by it after a step, with a checkpoint to go on from."""
    plan = [(0, "on_batch_end", 4, "SIGKILL"), (0, "on_restart", 0, "SIGTERM to the caller")]
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, "single", 1, "rows", plan, max_restarts=2, restart_every_steps=2)
    assert ended.value.code == 143
    newest = checkpoint.checkpoints(tmp_path / "checkpoints")[-1].info
    assert newest is not None
    # The signal takes its way through the caller: it may come when a step is done that has a checkpoint anyway.
    assert newest.reason == ("SIGTERM" if newest.step % 5 else "steps")
    plan = [*plan, (0, "on_batch_end", newest.step + 3, "raises")]
    tl, facts = train(tmp_path, "single", 1, "rows", plan, resume_from="last", max_restarts=1)
    [restart] = tl.restarts
    assert newest.step < restart.step <= newest.step + 3  # a checkpoint follows the first step
    expected = undisturbed("single", 1, "rows", 3)
    assert [name for name in facts if name != "checkpoints" and not same(facts[name], expected[name])] == []


@pytest.mark.long
@pytest.mark.filterwarnings(NO_CHECKPOINT)
def test_a_newer_checkpoint_of_the_user_is_taken(undisturbed: Undisturbed, tmp_path: Path) -> None:
    plan = [(0, "on_batch_end", 7, "SIGKILL"), (0, "never", 0, "no room for restarts")]
    restarts = assert_survives(undisturbed, tmp_path, "single", 1, "rows", plan[:1], restart_every_steps=4)
    assert [(restart.step, restart.steps_repeated) for restart in restarts] == [(5, 1)]
    tl, facts = train(tmp_path / "no room", "single", 1, "rows", plan, max_restarts=1, restart_every_steps=3)
    assert [(restart.step, restart.steps_repeated) for restart in tl.restarts] == [(5, 1)]
    expected = undisturbed("single", 1, "rows", 3)
    assert [name for name in facts if not same(facts[name], expected[name])] == []


class Tries(AbstractCallback):
    """Remembers after which steps checkpoints were begun; some of them fail. Dies once after a step."""

    def __init__(self, fails_at: tuple[int, ...], dies_at: int) -> None:
        super().__init__("Tries")
        self.fails_at, self.dies_at = fails_at, dies_at
        self.steps: list[int] = []
        self.dead = False

    def state_dict(self) -> dict[str, Any]:
        step = self.train_loop_obj.global_step
        self.steps.append(step)
        if step in self.fails_at:
            raise OSError("no room by plan")
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_restart(self, failure: Any) -> None:
        self.dead = True

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step == self.dies_at and not self.dead:
            os.kill(os.getpid(), signal.SIGKILL)


class DiesOnce(AbstractCallback):
    """At a step, without checkpoints for restarts until then where asked."""

    def __init__(self, folder: Path, step: int = 6, *, no_room: bool = False) -> None:
        super().__init__("DiesOnce")
        self.done, self.step, self.no_room = folder / "done", step, no_room

    def on_multiprocess_start(self) -> None:
        if self.no_room:
            write = file._write_with_checksums

            def refuses(target: Any, body: Any, info: Any) -> None:
                if info.reason == "restart":
                    raise OSError("no room by plan")
                write(target, body, info)

            file._write_with_checksums = refuses

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step == self.step and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.filterwarnings(NO_CHECKPOINT)
def test_the_checkpoint_that_is_taken_is_this_runs(tmp_path: Path) -> None:
    """Not that of another run in the folder of the first ModelCheckpoint, where this one has none yet."""

    def fit(*callbacks: AbstractCallback, seed: int = 3, **options: Any) -> TrainLoop:
        torch.manual_seed(seed)
        model = Layers(nn.Linear(6, 3))
        tl = cpu_loop(
            model,
            DataLoader(TensorDataset(*rows()), 8, shuffle=True),
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            seed=seed,
        )
        tl.fit(num_epochs=1, callbacks=list(callbacks), **options)
        return tl

    seldom = {"every_n_epochs": None, "every_n_steps": 9}
    fit(ModelCheckpoint(tmp_path / "first", **seldom), seed=4)
    whole = fit()
    often = ModelCheckpoint(tmp_path / "second", every_n_epochs=None, every_n_steps=2)
    dies = DiesOnce(tmp_path, no_room=True)
    tl = fit(ModelCheckpoint(tmp_path / "first", **seldom), often, dies, max_restarts=1)
    assert [restart.step for restart in tl.restarts] == [4]
    assert same(tl.model.state_dict(), whole.model.state_dict())
    assert tl.global_step == whole.global_step
    assert len(tl.history["loss"]) == 1


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("begins_at", [8, 4])
def test_a_resumed_run_restarts_as_the_same_run(tmp_path: Path, begins_at: int, steps: int) -> None:
    """At its first step and later: it owns the files of the run that it continues, or begins a branch, once."""

    def fit(folder: Path, *callbacks: AbstractCallback, **options: Any) -> TrainLoop:
        tl = linear_loop(batch_size=8)  # 12 steps an epoch
        keeper = ModelCheckpoint(folder, every_n_epochs=None, every_n_steps=4, keep=None)
        tl.fit(callbacks=[keeper, *callbacks], **options)
        return tl

    before = tmp_path / "before"
    fit(before, num_iterations=8)
    found = {}
    for name, callbacks, options in (
        ("undisturbed", [], {}),
        ("restarted", [DiesOnce(tmp_path, begins_at + steps)], {"max_restarts": 1, "restart_every_steps": 100}),
    ):
        folder = tmp_path / name
        shutil.copytree(before, folder)
        resume_from = folder / f"checkpoint-epoch=0001-step={begins_at:08d}.pt"
        tl = fit(folder, *callbacks, **options, num_epochs=2, resume_from=resume_from)
        assert len(tl.restarts) == bool(callbacks)
        found[name] = sorted(path.name for path in folder.iterdir())
    assert found["restarted"] == found["undisturbed"]
    assert len(found["restarted"]) == (7 if begins_at == 8 else 8)  # with .newest; the epoch is completed


@pytest.mark.long
def test_a_restarted_run_is_profiled_from_its_own_first_step(tmp_path: Path) -> None:
    model = Layers(nn.Linear(6, 3))
    profilers = [Profiler(tmp_path / "amidst", skip=3, warmup=1, active=4), DiesOnce(tmp_path)]
    tl = cpu_loop(model, DataLoader(TensorDataset(*rows()), 4))
    tl.fit(num_epochs=1, callbacks=profilers, max_restarts=1, restart_every_steps=1)
    [restart] = tl.restarts
    [trace] = (tmp_path / "amidst").iterdir()
    assert trace.name == f"rank0_step{restart.step + 8}.pt.trace.json"


def fails(error: Exception, **fit: Any) -> tuple[TrainLoop, WorkerFailedError]:
    tl = linear_loop(batch_size=8)
    with pytest.raises(WorkerFailedError) as raised:
        tl.fit(num_epochs=1, callbacks=[Raises(error, step=5)], **fit)
    return tl, raised.value


@pytest.mark.long
def test_a_failure_that_recurs_ends_the_run() -> None:
    tl, error = fails(LookupError("always"), max_restarts=-1)
    assert "rank 0 of 1 raised LookupError: always" in error.message
    assert "The same failure occurred again after step 4, so another restart would not help." in error.message
    assert "in fail" in error.traceback
    assert len(tl.restarts) == 1

    tl, error = fails(ConfigurationError("this package's own"), max_restarts=5)
    assert "occurred again" not in error.message
    assert tl.restarts == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_restarts": -2}, "max_restarts=-2: must be an int of 0 or more, or -1"),
        ({"max_restarts": 1.0}, "max_restarts=1.0: must be"),
        ({"max_restarts": True}, "max_restarts=True: must be"),
        ({"max_restarts": 1, "restart_every_steps": 0}, "restart_every_steps=0: must be an int of 1 or more"),
        ({"restart_every_steps": 2.5}, "restart_every_steps=2.5: must be an int"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    model = Layers(nn.Linear(6, 3))
    tl = TrainLoop(
        model,
        DataLoader(TensorDataset(*rows()), 8),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        accelerator="cpu",
    )
    with pytest.raises(ConfigurationError, match="^" + said.replace("(", r"\(")):
        tl.fit(num_epochs=1, **arguments)


# -- the whole table ---------------------------------------------------------------------------------------------------

ACTS = [
    "SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "exits", "sys.exit", "raises", "out of memory", "hangs",
    "hangs in native code", "loses its connections",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_each_kind_of_loader(undisturbed: Undisturbed, tmp_path: Path, kind: str, ranks: int) -> None:
    plan: list[Plan] = [(ranks - 1, "on_batch_end", 4, "SIGKILL"), (0, "on_batch_end", 5, "SIGKILL")]
    if "worker" in kind:
        plan += [(ranks - 1, "on_batch_begin", 6, "a worker dies")]
    mode = "ddp" if ranks > 1 else "single"
    assert_survives(undisturbed, tmp_path, mode, ranks, kind, plan, None if "sampler" in kind else 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("act", ACTS)
def test_each_kind_of_failure(undisturbed: Undisturbed, tmp_path: Path, act: str, ranks: int) -> None:
    plan: list[Plan] = [(ranks - 1, "on_after_gradient_update", 4, act), (0, "on_batch_end", 9, act)]
    assert_survives(undisturbed, tmp_path, "ddp", ranks, "rows", plan)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_moment(undisturbed: Undisturbed, tmp_path: Path, ranks: int) -> None:
    plan: list[Plan] = [
        (ranks - 1, "on_multiprocess_start", 0, "raises"),
        (ranks - 1, "on_restart", 0, "SIGKILL"),
        (0, "state_dict", 2, "SIGKILL"),
        (0, "checkpoint is half written", 5, "SIGKILL"),
        (0, "on_restart", 3, "SIGSEGV"),
        (0, "restart checkpoint is half written", 6, "exits"),
        (ranks - 1, "on_evaluation_begin", 8, "raises"),
        (ranks - 1, "on_epoch_end", 8, "SIGKILL"),
        (0, "on_epoch_begin", 8, "raises"),
        (ranks - 1, "on_train_end", 16, "SIGKILL"),
        (ranks - 1, "at exit", 16, "SIGSEGV"),
    ]
    assert_survives(undisturbed, tmp_path, "ddp" if ranks > 1 else "single", ranks, "rows", plan, in_order=False)


@pytest.mark.slow
def test_replicas_survive(undisturbed: Undisturbed, tmp_path: Path) -> None:
    plan = [(0, "on_batch_end", 4, "SIGKILL"), (0, "on_epoch_end", 7, "exits")]
    assert_survives(undisturbed, tmp_path, "dp", 2, "workers", plan, None)
