"""What there is to measure the day there is a GPU: python3 -m benchmarks.gpu [--tiny], in at most eight minutes.

Runs ``tests/gpu``, then trains the same models by hand and by the loop in this process, and writes ``GPU.rst`` and
``gpu.json``. Needs torch (2.6 on), numpy, tensorboard and pytest, and no network; what else trainloop imports may lie
in ``.deps`` (``pip install --target .deps cloudpickle psutil filelock tqdm`` where there is one).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
if (ROOT / ".deps").is_dir():
    sys.path.append(str(ROOT / ".deps"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / ".deps")]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from benchmarks.gpu_models import GPT, ResNet18  # noqa: E402
from benchmarks.timing import machine  # noqa: E402
from benchmarks.work import MLP  # noqa: E402
from trainloop import AbstractCallback, TrainLoop  # noqa: E402
from trainloop.callbacks.profiler import _PEAKS  # noqa: E402
from trainloop.checkpoint import HostCopy  # noqa: E402
from trainloop.launch import launch  # noqa: E402
from trainloop.train_loop.whole_step import WholeStepTraining  # noqa: E402

BUDGET_S = 440.0
AIMS = {"MLP": 0.95, "MLP, compile='step'": 0.5, "ResNet-18, bf16": 1.01, "GPT-2 small, bf16": 1.01}
CRITERION = nn.CrossEntropyLoss()
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


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
    """The measurements, one after the other, until the time is over.

    Parameters
    ----------
    tiny : bool
        Small models and few steps: whether it runs, not how fast.
    """

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.deadline = time.monotonic() + BUDGET_S
        self.results: dict[str, dict[str, Any]] = {}
        self.rounds = 1 if tiny else 3

    def run(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """One measurement; an error is a result too."""
        print(f"{name} ...", flush=True)
        if time.monotonic() > self.deadline:
            self.results[name] = {"left_out": "the time was over"}
            return
        began = time.monotonic()
        try:
            found = measure()
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        gc.collect()
        self.results[name] = {**found, "took_s": round(time.monotonic() - began, 1)}
        print(f"    {self.results[name]}", flush=True)

    def ratio(
        self, make_model: Callable[[], Any], batches: Any, dtype: torch.dtype | None = None, **options: Any
    ) -> dict[str, Any]:
        """Both loops in turn, over the same batches; medians."""
        options.setdefault("optimizer_of", partial(torch.optim.AdamW, lr=1e-4, fused=CUDA or None))
        warm_up = max(1, len(batches) // 5)
        model, seconds = make_model(), {"by hand": [], "trainloop": []}  # type: dict[str, list[float]]
        for _ in range(self.rounds):
            for name, train in (("by hand", by_hand), ("trainloop", with_trainloop)):
                seconds[name].append(train(copy.deepcopy(model), batches, warm_up=warm_up, dtype=dtype, **options))
        hand, own = (statistics.median(seconds[name]) for name in ("by hand", "trainloop"))
        return {"by_hand_us": hand * 1e6, "trainloop_us": own * 1e6, "ratio": own / hand}

    def all(self) -> None:
        """Everything, the cheap and telling first."""
        steps, scale = (15, 0) if self.tiny else (1000, 1)
        rows = lambda *shape: torch.randn(*shape, device=DEVICE)  # noqa: E731
        labels = lambda most, *shape: torch.randint(most, shape, device=DEVICE)  # noqa: E731
        small = [(rows(32, 32), labels(10, 32)) for _ in range(steps)]
        if not self.tiny:
            self.run("tests/gpu", self.tests)
        self.run("MLP", lambda: self.ratio(MLP, small))
        self.run("MLP, compile='step'", lambda: self.as_one_graph(small))
        self.run("synchronisations in ten steps", lambda: self.waits(small))
        images = [(rows(64, 3, 224, 224) if scale else rows(2, 3, 16, 16), labels(10, 64 if scale else 2))] * (
            60 if scale else 4
        )
        resnet = ResNet18 if scale else partial(ResNet18, 4, 10)
        self.run("ResNet-18, bf16", lambda: self.ratio(resnet, images, torch.bfloat16))
        self.run("GPT-2 small, bf16", self.gpt)
        self.run("prefetch from pinned memory", lambda: self.prefetch(scale))
        if CUDA:
            self.run("dp on one GPU", lambda: self.ratio(MLP, small, gpu_mode="dp"))
        self.run("ddp with one rank", lambda: self.ddp(small))
        self.run("two ranks on one device, Gloo", self.two_ranks)
        self.run("a checkpoint's stall", self.stall)
        self.run("the first fit's start", lambda: self.start(small))

    def tests(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        print(done.stdout[-3000:], flush=True)
        return {"summary": done.stdout.strip().splitlines()[-1], **({"failed": "see above"} if done.returncode else {})}

    def as_one_graph(self, batches: Any) -> dict[str, Any]:
        # Not fused, which torch keeps out of graphs: the compiler fuses by itself.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="compile='step'")
            return self.ratio(MLP, batches, optimizer_of=partial(torch.optim.AdamW, lr=1e-4), compile="step")

    def waits(self, batches: Any) -> dict[str, Any]:
        counts = CountsWaits()
        loop = make_loop(MLP(), batches[:15], torch.optim.AdamW, torch.bfloat16, gradient_clip_norm=1.0)
        loop.fit(num_epochs=1, callbacks=[counts])
        return {"synchronisations": counts.found[0] if CUDA else None}

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

    def prefetch(self, scale: int) -> dict[str, Any]:
        batch = 64 if scale else 4
        rows = batch * (60 if scale else 4)
        data = TensorDataset(torch.randn(rows, 3, *((64, 64) if scale else (8, 8))), torch.randint(10, (rows,)))
        resnet = partial(ResNet18, 64 if scale else 4, 10)
        return self.ratio(resnet, DataLoader(data, batch, pin_memory=CUDA), torch.bfloat16)

    def ddp(self, batches: Any) -> dict[str, Any]:
        x, y = (torch.cat([batch[i].cpu() for batch in batches]) for i in (0, 1))
        clock = Clock(max(1, len(batches) // 5))
        loop = make_loop(MLP().cpu(), DataLoader(TensorDataset(x, y), 32), torch.optim.AdamW, None, gpu_mode="ddp")
        loop.fit(num_epochs=1, callbacks=[clock])
        return {"trainloop_us": clock.seconds * 1e6, "backend": "nccl" if CUDA else "gloo"}

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

    def start(self, batches: Any) -> dict[str, Any]:
        found = {}
        for mode in ("single", "ddp"):
            data = TensorDataset(batches[0][0].cpu(), batches[0][1].cpu())
            loop = make_loop(MLP().cpu(), DataLoader(data, 32), torch.optim.AdamW, None, gpu_mode=mode)
            clock, began = Clock(1), time.perf_counter()
            loop.fit(num_epochs=1, callbacks=[clock])
            found[f"{mode}_s"] = clock.first - began  # clocks of processes are the machine's
            found[f"{mode}_whole_s"] = time.perf_counter() - began
        return found


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


# -- what is written ---------------------------------------------------------------------------------------------------


def text_of(report: dict[str, Any]) -> str:
    """The report as reStructuredText."""
    lines = ["On a GPU", "========", "", f"Written by ``make gpu`` in {report['minutes']:.1f} minutes.", ""]
    lines += [report["machine"], "", f"{report['failures']} failures.", ""]
    for name, values in report["results"].items():
        lines += [name, "-" * len(name), ""]
        if name in AIMS:
            values = {**values, "aim": AIMS[name]}
        lines += [f"* {key}: {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="whether it runs: on the CPU, too, where there is no GPU")
    parser.add_argument("--out", type=Path, default=None, help="folder of GPU.rst and gpu.json (benchmarks/)")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        parser.error("there is no CUDA device here: --tiny runs on the CPU, and measures nothing.")
    out = arguments.out or (Path(tempfile.mkdtemp(prefix="trainloop-gpu-")) if arguments.tiny else HERE)
    if arguments.tiny:
        WholeStepTraining.backend = "aot_eager"  # no C++ compiler, no Triton
        torch.set_num_threads(1)
    torch.manual_seed(0)
    began, where, bench = time.monotonic(), machine(), Bench(arguments.tiny)
    bench.all()
    results = bench.results
    report = {
        "machine": where,
        "tiny": arguments.tiny,
        "minutes": (time.monotonic() - began) / 60,
        "failures": sum("failed" in values for values in results.values()),
        "results": results,
    }
    (out / "gpu.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "GPU.rst").write_text(text_of(report))
    print(f"wrote {out / 'GPU.rst'} and gpu.json: {report['failures']} failures")
    sys.exit(bool(report["failures"]))


if __name__ == "__main__":
    main()
