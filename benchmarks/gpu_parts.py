"""The measurements of ``benchmarks.gpu``: python3 -m benchmarks.gpu_parts --to FD [--tiny] PART..., in this order.

A separate process, which may be ended at any time: it writes each part that it begins, and each result, as a line of
JSON to a file descriptor.
"""

import argparse
import copy
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_models import GPT, ResNet18
from benchmarks.pages import provenance
from benchmarks.work import MLP
from trainloop import AbstractCallback, TrainLoop
from trainloop._launch import launch
from trainloop.callbacks.watch.profiler import _PEAKS
from trainloop.checkpoint import HostCopy
from trainloop.train_loop.training.whole_step import WholeStepTraining

ROOT = Path(__file__).parent.parent
CRITERION = nn.CrossEntropyLoss()
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
_adamw = partial(torch.optim.AdamW, lr=1e-4, fused=CUDA or None)


def wait() -> None:
    """Until the device has done all."""
    if CUDA:
        torch.cuda.synchronize()


# -- the two loops -----------------------------------------------------------------------------------------------------


def by_hand(model: Any, batches: Any, optimizer_of: Any, warm_up: int, dtype: torch.dtype | None, **_: Any) -> float:
    """Seconds a step, after the first ones."""
    optimizer, steps, began = optimizer_of(model.parameters()), 0, 0.0
    model.to(DEVICE).train()
    for batch in batches:
        batch = [part.to(DEVICE, non_blocking=True) for part in batch]
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            loss = model.get_loss(batch, CRITERION, DEVICE)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == warm_up:
            wait()
            began = time.perf_counter()
    wait()
    return (time.perf_counter() - began) / (steps - warm_up)


class Clock(AbstractCallback):
    """Seconds a step after the first ones; and how often the host waited for the device in these, on CUDA."""

    def __init__(self, warm_up: int) -> None:
        super().__init__("clock")
        self.warm_up, self.began, self.first, self.seconds = warm_up, 0.0, 0.0, 0.0

    def on_batch_begin(self) -> None:
        self.first = self.first or time.perf_counter()

    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.global_step == self.warm_up:
            wait()
            self.began = time.perf_counter()

    def on_epoch_end(self) -> None:
        wait()
        steps = self.train_loop_obj.global_step - self.warm_up
        self.seconds = (time.perf_counter() - self.began) / max(steps, 1)


def make_loop(model: Any, batches: Any, optimizer_of: Any, dtype: torch.dtype | None, **options: Any) -> TrainLoop:
    model.to(DEVICE)
    return TrainLoop(
        model,
        batches,
        optimizer=optimizer_of(model.parameters()),
        criterion=CRITERION,
        use_amp="bf16" if dtype is not None else False,
        **{"accelerator": DEVICE.type, "devices": 1, "progress_bar": False, **options},
    )


def with_trainloop(
    model: Any, batches: Any, optimizer_of: Any, warm_up: int, dtype: torch.dtype | None, **options: Any
) -> float:
    clock = Clock(warm_up)
    make_loop(model, batches, optimizer_of, dtype, **options).fit(num_epochs=1, callbacks=[clock])
    return clock.seconds


@contextmanager
def counted_waits(found: list[int]) -> Iterator[None]:
    """How often torch makes the host wait for the device."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if CUDA:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if CUDA:
                torch.cuda.set_sync_debug_mode("default")
    found.append(sum("synchronizing CUDA operation" in str(one.message) for one in told))


class CountsWaits(AbstractCallback):
    """Of ten steps in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__("waits")
        self.found: list[int] = []
        self._context: Any = None

    def on_batch_begin(self) -> None:
        if self.train_loop_obj.global_step == 3:
            self._context = counted_waits(self.found)
            self._context.__enter__()

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step == 13:
            self._context.__exit__(None, None, None)


# -- what is measured --------------------------------------------------------------------------------------------------


class Bench:
    """The measurements.

    Parameters
    ----------
    tiny : bool
        Small models and few steps: whether it runs, not how fast.
    """

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.rounds = 1 if tiny else 7

    @cached_property
    def small(self) -> list[tuple[Tensor, Tensor]]:
        """Batches for the MLP, on the device."""
        return [
            (torch.randn(32, 32, device=DEVICE), torch.randint(10, (32,), device=DEVICE))
            for _ in range(15 if self.tiny else 1000)
        ]

    def rows(self) -> TensorDataset:
        """The same rows in the host's memory."""
        return TensorDataset(*(torch.cat([batch[i].cpu() for batch in self.small]) for i in (0, 1)))

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """By the names in ``benchmarks.gpu_plan.PLAN``."""
        return {
            **{name: partial(self.check, check) for name, check in CHECKS.items()},
            "tests/gpu: data and training": lambda: self.tests("data", "training"),
            "tests/gpu: the others": lambda: self.tests("devices", "launch", "parallel", "restarts", "fsdp", at_once=4),
            "MLP": lambda: self.ratio(MLP, self.small),
            "MLP, a loader that pins": lambda: self.ratio(MLP, DataLoader(self.rows(), 32, pin_memory=CUDA)),
            "MLP, compile='step'": self.as_one_graph,
            "synchronisations in ten steps": self.waits,
            "ResNet-18, bf16": self.resnet,
            "GPT-2 small, bf16": self.gpt,
            "prefetch from pinned memory": self.prefetch,
            "dp on one GPU": lambda: self.ratio(MLP, self.small, gpu_mode="dp"),
            "ddp with one rank": self.ddp,
            "two ranks on one device, Gloo": self.two_ranks,
            "a checkpoint's stall": self.stall,
            "the first fit's start": self.start,
        }

    def ratio(
        self, make_model: Callable[[], Any], batches: Any, dtype: torch.dtype | None = None, **options: Any
    ) -> dict[str, Any]:
        """Both loops in turn, over the same batches: medians, and the median of the ratios of the rounds."""
        options.setdefault("optimizer_of", _adamw)
        warm_up = max(1, len(batches) // 5)
        model, seconds = make_model(), {"PyTorch": [], "trainloop": []}  # type: dict[str, list[float]]
        for _ in range(self.rounds):
            for name, train in (("PyTorch", by_hand), ("trainloop", with_trainloop)):
                seconds[name].append(train(copy.deepcopy(model), batches, warm_up=warm_up, dtype=dtype, **options))
        hand, own = (statistics.median(seconds[name]) for name in ("PyTorch", "trainloop"))
        ratios = [own / hand for hand, own in zip(*seconds.values(), strict=True)]
        return {"by_hand_us": hand * 1e6, "trainloop_us": own * 1e6, "ratio": statistics.median(ratios)}

    def check(self, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return check() if CUDA else {"left_out": "needs a GPU"}

    def tests(self, *names: str, at_once: int = 1) -> dict[str, Any]:
        """``at_once``: files that may run beside each other, if pytest-xdist is installed."""
        files = [f"tests/gpu/test_{name}_gpu.py" for name in names]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files, "-p", "no:cacheprovider"]
        if at_once > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(at_once), "--dist", "loadfile", "-p", "no:benchmark"]  # which warns beside xdist
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        lines: deque[str] = deque([""], maxlen=1)
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as pytest:
            for line in pytest.stdout or ():  # at once, so that the screen has what was found where the time is over
                print(line, end="", flush=True)
                lines.append(line.strip() or lines[-1])
        return {"summary": lines[-1], **({"failed": "see above"} if pytest.returncode else {})}

    def as_one_graph(self) -> dict[str, Any]:
        # Not fused, which torch keeps out of graphs: the compiler fuses by itself.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="compile='step'")
            return self.ratio(MLP, self.small, optimizer_of=partial(torch.optim.AdamW, lr=1e-4), compile="step")

    def waits(self) -> dict[str, Any]:
        counts = CountsWaits()
        loop = make_loop(MLP(), self.small[:15], torch.optim.AdamW, torch.bfloat16, gradient_clip_norm=1.0)
        loop.fit(num_epochs=1, callbacks=[counts])
        return {"synchronisations": counts.found[0] if CUDA else None}

    def resnet(self) -> dict[str, Any]:
        images, side = (2, 16) if self.tiny else (64, 224)
        batch = torch.randn(images, 3, side, side, device=DEVICE), torch.randint(10, (images,), device=DEVICE)
        make = partial(ResNet18, 4, 10) if self.tiny else ResNet18
        return self.ratio(make, [batch] * (4 if self.tiny else 60), torch.bfloat16)

    def gpt(self) -> dict[str, Any]:
        make = partial(GPT, 64, 16, 2, 32) if self.tiny else GPT
        model = make()
        batch, length = (2, 16) if self.tiny else (8, 1024)
        tokens = torch.randint(64 if self.tiny else 50257, (2, batch, length), device=DEVICE)
        found = self.ratio(make, [tuple(tokens)] * (4 if self.tiny else 30), torch.bfloat16)
        speed = batch * length / (found["trainloop_us"] * 1e-6)
        name = torch.cuda.get_device_name() if CUDA else ""
        peak = next((peak for word, peak in _PEAKS.items() if word in name), None)
        mfu = None if peak is None else speed * model.flops_per_token() / peak
        return {**found, "tokens_per_s": speed, "mfu": mfu}

    def prefetch(self) -> dict[str, Any]:
        batch, side, steps, width = (4, 8, 4, 4) if self.tiny else (64, 64, 60, 64)
        rows = batch * steps
        data = TensorDataset(torch.randn(rows, 3, side, side), torch.randint(10, (rows,)))
        return self.ratio(partial(ResNet18, width, 10), DataLoader(data, batch, pin_memory=CUDA), torch.bfloat16)

    def ddp(self) -> dict[str, Any]:
        """Both loops in one rank each, over the same loader."""
        data, warm_up = self.rows(), max(1, len(self.small) // 5)
        by_hand = launch(partial(_trains, data, warm_up), ranks_per_node=1, devices=[DEVICE])
        clock = Clock(warm_up)
        make_loop(MLP().cpu(), DataLoader(data, 32), _adamw, None, gpu_mode="ddp").fit(num_epochs=1, callbacks=[clock])
        own = clock.seconds * 1e6
        return {**by_hand, "trainloop_us": own, "ratio": own / by_hand["by_hand_us"]}

    def two_ranks(self) -> dict[str, Any]:
        return launch(partial(_reduces, 3 if self.tiny else 200), ranks_per_node=2, devices=[DEVICE] * 2)

    def stall(self) -> dict[str, Any]:
        """How long training stands still for a checkpoint: until its state lies in the host's memory."""
        model = (GPT(64, 16, 2, 32) if self.tiny else GPT()).to(DEVICE)
        copies, seconds = HostCopy(), []
        for _ in range(4):
            wait()
            began = time.perf_counter()
            copies.copy({"model": model.state_dict()})
            seconds.append(time.perf_counter() - began)
        size = sum(t.nbytes for t in model.state_dict().values())
        return {"first_ms": seconds[0] * 1e3, "later_ms": min(seconds[1:]) * 1e3, "megabytes": size / 1e6}

    def start(self) -> dict[str, Any]:
        found = {}
        for mode in ("single", "ddp"):
            data = TensorDataset(*(part.cpu() for part in self.small[0]))
            loop = make_loop(MLP().cpu(), DataLoader(data, 32), torch.optim.AdamW, None, gpu_mode=mode)
            clock, began = Clock(1), time.perf_counter()
            loop.fit(num_epochs=1, callbacks=[clock])
            found[f"{mode}_s"] = clock.first - began  # clocks of processes are the machine's
            found[f"{mode}_whole_s"] = time.perf_counter() - began
        return found


def _trains(data: TensorDataset, warm_up: int, stop: Any) -> dict[str, Any]:
    """In the only rank: a hand-written loop with torch's DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(MLP().to(DEVICE), [DEVICE] if CUDA else None)
    optimizer, began = _adamw(model.parameters()), 0.0
    for step, (x, y) in enumerate(DataLoader(data, 32)):
        if step == warm_up:
            wait()
            began = time.perf_counter()
        loss = CRITERION(model(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wait()
    seconds = (time.perf_counter() - began) / (len(data) / 32 - warm_up)
    return {"by_hand_us": seconds * 1e6, "backend": dist.get_backend()}


def _reduces(steps: int, stop: Any) -> dict[str, Any]:
    """In each of two ranks that share a device."""
    model = nn.parallel.DistributedDataParallel(MLP().to(DEVICE))
    x, y = torch.randn(32, 32, device=DEVICE), torch.randint(10, (32,), device=DEVICE)
    for step in range(steps + 1):
        if step == 1:
            wait()
            began = time.perf_counter()
        CRITERION(model(x), y).backward()
        model.zero_grad()
    wait()
    return {"by_hand_us": (time.perf_counter() - began) / steps * 1e6, "backend": dist.get_backend()}


# -- one after the other -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=int, required=True, help="file descriptor of the findings")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("parts", nargs="*")
    arguments = parser.parse_args()

    def tell(**finding: Any) -> None:
        os.write(arguments.to, f"{json.dumps(finding)}\n".encode())

    if arguments.tiny:
        WholeStepTraining.backend = "aot_eager"  # no C++ compiler, no Triton
        torch.set_num_threads(1)
    torch.manual_seed(0)
    tell(machine=provenance(), cuda=CUDA)
    measures = Bench(arguments.tiny).parts()
    for part in arguments.parts:
        tell(begins=part)
        try:
            found = measures[part]()
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        tell(part=part, found=found)
        if "failed" in found:
            return  # after an error of CUDA every later call would fail: the others begin in a new process
        gc.collect()


if __name__ == "__main__":
    main()
