"""The checks of ``make gpu``: what can be wrong on a GPU only, each with the figures that decide. See ``gpu_plan.py``.

Each check returns its figures, with an entry ``failed`` if they are not as expected.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset, default_collate

from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop._launch.failures import is_about_memory
from trainloop.checkpoint.plain import pinned_like

__all__ = ["CHECKS"]


class Net(TTModel):
    """A classifier with BatchNorm and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(self(batch_data[0]), batch_data[1])

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data[0]).argmax(1), batch_data[1], {}


class Segmenter(Net):
    """A loss over the pixels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 3, 1))


def data(rows: int = 64) -> TensorDataset:
    """Rows of eight numbers in three classes."""
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(rows, 8, generator=generator, device="cpu")
    return TensorDataset(x, x[:, :3].argmax(1))


def make_loop(model: TTModel, loader: Any, **options: Any) -> TrainLoop:
    """Return a loop on one GPU."""
    options.setdefault("optimizer", optim.SGD(model.parameters(), lr=0.1))
    return TrainLoop(
        model,
        loader,
        criterion=nn.CrossEntropyLoss(),
        **{"accelerator": "cuda", "devices": 1, "progress_bar": False, **options},
    )


def _unless(right: bool, **figures: Any) -> dict[str, Any]:
    return figures if right else {**figures, "failed": "not as expected"}


def something_runs() -> dict[str, Any]:
    """Train and evaluate."""
    loop = make_loop(Net(), DataLoader(data(), 8), validation_loader=DataLoader(data(), 8))
    loop.fit(num_epochs=5)
    first, last, val = loop.history["loss"][0], loop.history["loss"][-1], loop.history["val_loss"][-1]
    return _unless(last < first and val == val, device=torch.cuda.get_device_name(), first=first, last=last, val=val)


def _batches_of(extra: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    def collate(items: Any) -> Any:
        x, y = default_collate(items)
        return x, y, extra(x)

    return collate


def _in_a_defaultdict(items: Any) -> Any:
    batch: Any = defaultdict(list)
    batch[0], batch[1] = default_collate(items)
    return batch


_ODD = {
    "expanded": _batches_of(lambda x: torch.ones(1, 4).expand(len(x), 4)),
    "sparse": _batches_of(lambda x: torch.eye(4).to_sparse()),
    "CSR": _batches_of(lambda x: torch.eye(4).to_sparse_csr()),
    "nested": _batches_of(lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "jagged": _batches_of(lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    "empty": _batches_of(lambda x: (torch.empty(0, 3), torch.tensor(3.0), torch.ones(4, 3).t())),
    "defaultdict": _in_a_defaultdict,
}


def odd_batches() -> dict[str, Any]:
    """Train on batches that contain unusual tensors, in ``single`` and on a rank of ``ddp`` and ``fsdp``."""
    refused = {}
    for mode in ("single", "ddp", "fsdp"):
        for kind, collate in _ODD.items():
            try:
                with warnings.catch_warnings(action="ignore"):  # sparse CSR and nested tensors are beta
                    make_loop(Net(), DataLoader(data(16), 4, collate_fn=collate), gpu_mode=mode).fit(num_epochs=1)
            except Exception as error:
                refused[f"{kind} in {mode}"] = str(error).splitlines()[0][:200]
    return _unless(not refused, kinds=len(_ODD), refused=refused)


class _Reserved(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("reserved")
        self.bytes: list[int] = []

    def on_epoch_end(self) -> None:
        torch.cuda.synchronize()
        self.bytes.append(torch.cuda.memory_reserved())


class _Wide(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(self(batch_data[0][:, :8]), batch_data[1])


def memory_of_epochs() -> dict[str, Any]:
    """Compare the memory that torch has reserved after two and after ten epochs, with an evaluation in each."""
    loader = DataLoader(TensorDataset(torch.zeros(24, 1 << 18), torch.arange(24) % 3), 4)  # 4 MiB a batch
    loop = make_loop(_Wide(), loader, validation_loader=loader)
    loop.model.get_predictions = lambda batch, device: (batch[1], batch[1], {})
    loop.fit(num_epochs=10, callbacks=[reserved := _Reserved()])
    return _unless(reserved.bytes[9] <= reserved.bytes[1], mebibytes=[size >> 20 for size in reserved.bytes])


def one_graph() -> dict[str, Any]:
    """Compare the losses of ``compile='step'`` with those of an eager run."""
    losses = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for compiled in ("step", False):
            model = Net()
            optimizer = optim.AdamW(model.parameters(), 0.01)
            loop = make_loop(
                model, DataLoader(data(330), 16), optimizer=optimizer, compile=compiled, gradient_clip_norm=1.0
            )
            loop.fit(num_epochs=3)
            losses.append(loop.history["loss"])
    refused = [str(one.message)[:200] for one in said if "compile=" in str(one.message)]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return _unless(not refused and apart < 1e-3, refused=refused, apart=apart)


def default_device() -> dict[str, Any]:
    """Train while new tensors of the script are on the GPU."""
    trained = []
    torch.set_default_device("cuda")
    try:
        for mode in ("single", "ddp"):
            generator = torch.Generator("cuda")
            loop = make_loop(Net(), DataLoader(data(), 8, shuffle=True, generator=generator), gpu_mode=mode)
            loop.fit(num_epochs=1)
            trained.append(mode)
    finally:
        torch.set_default_device(None)
    return _unless(trained == ["single", "ddp"], trained=trained)


def contexts() -> dict[str, Any]:
    """Start ``ddp`` with ``auto_select_gpus`` in a fresh process, and ask NVML for this process's contexts."""
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return {"left_out": "pip install nvidia-ml-py"}
    command = [sys.executable, "-m", "benchmarks.gpu_checks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().rpartition("\n")[2][:300]}
    found = json.loads(done.stdout.splitlines()[-1])
    return _unless(found["ours"] == 0, **found)


def _caller_of_ranks() -> None:
    import pynvml

    make_loop(Net(), DataLoader(data(), 8), gpu_mode="ddp", auto_select_gpus=True).fit(num_epochs=1)
    pynvml.nvmlInit()
    pids = [
        process.pid
        for index in range(pynvml.nvmlDeviceGetCount())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
    ]
    print(json.dumps({"ours": pids.count(os.getpid()), "others": len(pids) - pids.count(os.getpid())}))


class _Skips(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("skips")
        self.count = 0

    def on_after_optimizer_step(self) -> None:
        self.count += self.train_loop_obj.step_skipped


def skipped_steps() -> dict[str, Any]:
    """Count the steps that fp16 skips with a loss over pixels, in both loops, with and without accumulation."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(48, 1, 96, 96, generator=generator)
    loader = DataLoader(TensorDataset(images, torch.randint(0, 3, (48, 96, 96), generator=generator)), 2)
    own, hand = {}, {}
    for accumulation in (1, 2):
        model = Segmenter()
        loop = make_loop(copy.deepcopy(model), loader, use_amp="fp16")
        loop.fit(num_epochs=1, grad_accumulation=accumulation, callbacks=[skips := _Skips()])
        own[accumulation], hand[accumulation] = skips.count, _skipped_by_hand(model.cuda(), loader, accumulation)
    return _unless(all(own[n] <= hand[n] for n in own), trainloop=own, by_hand=hand)


def _skipped_by_hand(model: nn.Module, loader: Any, accumulation: int) -> int:
    optimizer, scaler, skipped = optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda"), 0
    for i, (x, y) in enumerate(loader, start=1):
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda()) / accumulation
        scaler.scale(loss).backward()
        if i % accumulation == 0:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += scaler.get_scale() < before
    return skipped


def memory() -> dict[str, Any]:
    """Pin memory for a model's checkpoint; run out of memory, and see that it is free again."""
    sizes: list[int] = []

    def allocate(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    weights = [torch.empty(2100, 1024, device="cuda") for _ in range(12)]
    copies = pinned_like(weights, allocate)
    times = sum(sizes) / sum(weight.nbytes for weight in weights)
    pinned = all(one.is_pinned() for one in copies)
    del weights, copies
    gc.collect()
    torch.cuda.empty_cache()
    before, known = torch.cuda.memory_reserved(), False
    try:
        torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        known = is_about_memory(error) is True
    after = torch.cuda.memory_reserved()
    right = pinned and times < 1.6 and known and after <= before
    return _unless(right, pinned=pinned, times_the_model=times, recognised=known, left_bytes=after - before)


def kernels() -> dict[str, Any]:
    """Count the kernels of a step with accumulation, in both loops: what 16 batches launch more than 8."""
    from torch.profiler import ProfilerActivity, profile

    model = Net()
    model.layers = nn.Sequential(nn.Linear(8, 16), *[nn.Linear(16, 16) for _ in range(40)], nn.Linear(16, 3))
    other = copy.deepcopy(model).cuda()
    loaders = {batches: DataLoader(data(4 * batches), 4) for batches in (8, 16)}
    optimizer = optim.AdamW(other.parameters())
    loops = {n: make_loop(model, loaders[n], optimizer=optim.AdamW(model.parameters())) for n in loaders}

    def by_hand(batches: int) -> None:
        for i, (x, y) in enumerate(loaders[batches], start=1):
            (nn.functional.cross_entropy(other(x.cuda()), y.cuda()) / 2).backward()
            if i % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    def launches(train: Callable[[int], Any], batches: int) -> int:
        train(batches)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            train(batches)
            torch.cuda.synchronize()
        names = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
        return sum(event.count for event in profiler.key_averages() if event.key in names)

    ways = {"trainloop": lambda n: loops[n].fit(num_epochs=1, grad_accumulation=2), "by_hand": by_hand}
    found = {name: (launches(train, 16) - launches(train, 8)) / 4 for name, train in ways.items()}
    # Whether the step's weight is 1 is known on the device only, so that each gradient is multiplied by it.
    parameters = len(list(model.parameters()))
    return _unless(found["trainloop"] <= found["by_hand"] + parameters + 20, parameters=parameters, **found)


def two_gpus() -> dict[str, Any]:
    """Compare the weights of ``ddp`` on two GPUs with those of one process."""
    if torch.cuda.device_count() < 2:
        return {"left_out": "needs two GPUs"}
    models = []
    for mode, devices in (("single", 1), ("ddp", 2)):
        model = Net()
        model.layers[1] = nn.Identity()  # BatchNorm would normalise over half of the batch
        model.double()
        loader = DataLoader(TensorDataset(data().tensors[0].double(), data().tensors[1]), 8 // devices)
        make_loop(model, loader, gpu_mode=mode, devices=devices).fit(num_epochs=2)
        models.append([p.detach().cpu() for p in model.parameters()])
    apart = max(float((a - b).abs().max()) for a, b in zip(*models, strict=True))
    return _unless(apart < 1e-6, apart=apart)


CHECKS = {
    "something runs": something_runs,
    "odd batches": odd_batches,
    "memory of epochs": memory_of_epochs,
    "compile='step' is one graph": one_graph,
    "default device": default_device,
    "contexts": contexts,
    "steps that fp16 skips": skipped_steps,
    "pinned memory and out of memory": memory,
    "kernels a step": kernels,
    "two GPUs": two_gpus,
}
"""The checks, by their names in ``benchmarks.gpu_plan.PLAN``."""


if __name__ == "__main__":
    _caller_of_ranks()
