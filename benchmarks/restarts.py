"""The cost of max_restarts without a failure, and the time of a restart.

python -m benchmarks.restarts [--rounds 5] writes RESTARTS.rst. ``benchmarks/restarts_beside.py`` compares with other
libraries, and ``make soak-restarts`` shows whether runs survive random failures.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import work
from benchmarks.ddp import make_loop
from benchmarks.pages import Page, Size, parser, size_of
from benchmarks.timing import PairedTable, Table
from trainloop import AbstractCallback, TrainLoop
from trainloop._launch.rank_process import end_with_parent

PLAIN, SURVIVES = "max_restarts=0", "max_restarts=3"


class Clock(AbstractCallback):
    """When the first step was done."""

    def __init__(self) -> None:
        super().__init__("clock")
        self.first_step = 0.0

    def on_after_optimizer_step(self) -> None:
        self.first_step = self.first_step or time.monotonic()


class Pauses(AbstractCallback):
    """Steps from one checkpoint for restarts to the next, as the run has chosen them."""

    def __init__(self) -> None:
        super().__init__("pauses")
        self.made: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        self.made.append(self.train_loop_obj.global_step)
        return super().state_dict()

    def usual(self) -> int:
        pauses = [after - before for before, after in zip(self.made, self.made[1:])]
        return statistics.median_low(pauses[len(pauses) // 2 :])


class Turns(AbstractCallback):
    """Rank 0 tells what a block of steps took, by the clock and of CPU time, and waits until it is its turn again."""

    def __init__(self, folder: Path, block: int) -> None:
        super().__init__("turns")
        self.folder, self.block = folder, block

    def on_train_begin(self) -> None:
        if self.train_loop_obj.is_global_zero:  # numbers: payloads can hold these
            self.turn, self.told = (os.open(self.folder / name, os.O_RDWR) for name in ("turn", "told"))
            self.begin, self.cpu_begin = time.perf_counter(), time.process_time()

    def on_batch_end(self) -> None:
        # In a block's middle, so that a checkpoint, written at its multiples, is whole in one block.
        loop = self.train_loop_obj
        if loop.is_global_zero and loop.global_step % self.block == self.block // 2:
            seconds, cpu_seconds = time.perf_counter() - self.begin, time.process_time() - self.cpu_begin
            os.write(self.told, f"{seconds} {cpu_seconds}\n".encode())
            os.read(self.turn, 1)
            self.begin, self.cpu_begin = time.perf_counter(), time.process_time()


class Kill(AbstractCallback):
    """Kills rank 1 once, after its 20th step."""

    def __init__(self, folder: str) -> None:
        super().__init__("kill")
        self.done = Path(folder, "done")

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.rank == 1 and loop.global_step == 20 and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fit(model: Any, batches: int, callbacks: list[Any], epochs: int, **arguments: Any) -> TrainLoop[Any]:
    loop = make_loop(model, batches)
    loop.fit(num_epochs=epochs, callbacks=callbacks, **arguments)
    return loop


def take_turns(kind: Any, folder: Path, block: int, blocks: int, arguments: dict[str, Any]) -> None:
    """In a process of its own: a run of some blocks of steps, and of one before them."""
    end_with_parent(-1)  # it would wait for its turn for ever
    torch.set_num_threads(1)
    fit(kind(), block * (blocks + 1), [Turns(folder, block)], 1, **arguments)


class Contender:
    """A run that stands still, but for when it is its turn; a context manager."""

    def __init__(self, kind: Any, folder: Path, block: int, blocks: int, **arguments: Any) -> None:
        folder.mkdir()
        self._turn, self._told = (_fifo(folder / name) for name in ("turn", "told"))
        target = (kind, folder, block, blocks, arguments)
        self._process = multiprocessing.get_context("spawn").Process(target=take_turns, args=target)
        self._process.start()
        self.ended()  # ranks are up and warm

    def block(self) -> tuple[float, float]:
        """What a block of steps takes, by the clock and of CPU time."""
        os.write(self._turn, b".")
        return self.ended()

    def ended(self) -> tuple[float, float]:
        if not select.select([self._told], [], [], 120)[0]:
            raise TimeoutError(f"no block of steps was done in 120 s; the run's exit code: {self._process.exitcode}")
        seconds, cpu_seconds = map(float, os.read(self._told, 200).split())
        return seconds, cpu_seconds

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.terminate()
        os.write(self._turn, b".")
        self._process.join()
        os.close(self._turn)
        os.close(self._told)


def _fifo(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def cost(kind: Any, size: Size, steps: int, turns: int = 10) -> PairedTable:
    """All runs are up at once, and take turns; a block is as long as a run by itself waits between checkpoints."""
    if size.tiny:
        block, turns = 20, 1
    else:
        pauses = Pauses()
        fit(kind(), steps, [pauses], 1, max_restarts=3)
        block = pauses.usual()
    rounds = size.rounds
    table = PairedTable(
        f"{kind.__name__}, two ranks",
        f"Each block has {block} steps and writes one checkpoint; a separate run of {steps} steps chose this interval. "
        f"There are {rounds} starts with {turns} turns each.",
        steps=block,
        base=PLAIN,
        aims={SURVIVES: 1.02},
    )
    # The same a second time shows what the method can tell.
    contenders: dict[str, dict[str, Any]] = {
        PLAIN: {},
        f"{PLAIN}, again": {},
        SURVIVES: {"max_restarts": 3, "restart_every_steps": block},
    }
    names = list(contenders)
    for start in range(rounds):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            runs = {
                name: stack.enter_context(Contender(kind, Path(folder, str(i)), block, turns, **contenders[name]))
                for i, name in enumerate(names[start % 3 :] + names[: start % 3])
            }
            blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for turn in range(turns):
                for i in range(3):
                    name = names[(start + turn + i) % 3]
                    blocks[name].append(runs[name].block())
            table.starts.append(blocks)
    return table


def recovery(size: Size) -> Table:
    """From the call to the first step, and from a kill to the first step after it."""
    table = Table(
        "From a failure to the next step, two ranks",
        "``start-up`` is the time from the call of ``fit`` to its first step, with ranks from a running fork server. "
        "``restart`` is the time from a kill to the next step.",
        unit="ms",
        base="start-up",
        aims={"restart": 1.5},
    )
    for turn in range(size.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            clock, begin = Clock(), time.monotonic()
            fit(work.MLP(), 50, [clock], 1)
            loop = fit(work.MLP(), 50, [Kill(folder)], 1, max_restarts=1)
        if turn:
            table.seconds.setdefault("start-up", []).append(clock.first_step - begin)
            table.seconds.setdefault("restart", []).append(loop.restarts[0].seconds)
    return table


NOTE = """To measure the cost of a run
without failures, each run trains in two ranks. All runs are kept alive at the same time and take turns: in each turn,
every run trains one block of steps while the other runs wait. A ratio is the median, over all turns, of a block's time
relative to the block of ``max_restarts=0`` in the same turn. Its range contains 90 % of the medians of resampled
starts. ``max_restarts=0`` takes part twice; its second ratio shows the error of the method. `SURVIVAL <SURVIVAL.rst>`_
has the results of ``make soak-restarts``."""

PARTS: dict[str, Callable[[Size], Table | PairedTable]] = {
    "recovery": recovery,
    "mlp": lambda size: cost(work.MLP, size, 3000),
    "cnn": lambda size: cost(work.CNN, size, 1000),
}


def main() -> None:
    arguments = parser(__doc__, rounds=5).parse_args()
    size = size_of(arguments)
    torch.set_num_threads(1)
    page = Page("RESTARTS", "Restarts after failures: measured", "python -m benchmarks.restarts")
    parts = []
    for name, part in PARTS.items():
        if size.tiny and name == "cnn":  # the same code as for the MLP
            continue
        parts.append(part(size).text())
        print(parts[-1], flush=True)
    page.write(arguments.out, size, NOTE, parts)


if __name__ == "__main__":
    main()
