"""Tensors that are not where the run is, and a full ``/dev/shm``: the error names them and the remedy."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import FSDP
from kit.small_loop import make_loop
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop._launch.failures import Failure, hint
from trainloop.data.batch.batches import described
from trainloop.errors import ConfigurationError
from trainloop.train_loop.arguments.options import AmpOptions


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 3))
        self.scale: Any = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * (self.scale["x"] if isinstance(self.scale, dict) else self.scale))


def fit(model: Any, criterion: Any = None, data: Any = None, **arguments: Any) -> None:
    loader = DataLoader(make_data() if data is None else data, batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"accelerator": "cpu", "progress_bar": False, **arguments}
    TrainLoop(model, loader, None, None, optimizer, criterion or nn.CrossEntropyLoss(), **options).fit(num_epochs=1)


@pytest.mark.parametrize("mode", ["single", "dp", "ddp"])
def test_a_parameter_or_buffer_without_values_is_refused_before_a_start(mode: str) -> None:
    model = Net()
    model.inner[0] = nn.Linear(8, 3, device="meta")
    with pytest.raises(ConfigurationError, match=r"^model\.inner\.0\.weight is on the meta device and has no values\."):
        fit(model, gpu_mode=mode)
    model = Net()
    del model.scale
    model.register_buffer("scale", torch.ones(8, device="meta"))
    with pytest.raises(ConfigurationError, match=r"^model\.scale is on the meta device .*to_empty\(device='cpu'\)"):
        fit(model, gpu_mode=mode)


@pytest.mark.parametrize("mode", ["single", "dp", "ddp", FSDP])
def test_a_criterion_without_values_is_refused_before_a_start(mode: str) -> None:
    criterion = nn.CrossEntropyLoss(torch.ones(3, device="meta"))
    with pytest.raises(ConfigurationError, match=r"^criterion\.weight is on the meta device .*criterion\.to_empty"):
        fit(Net(), criterion, gpu_mode=mode)


@pytest.mark.parametrize("mode", ["single", "dp", "ddp"])
def test_training_without_gradients_is_refused_before_a_start(mode: str) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with pytest.raises(ConfigurationError, match="fit was called where gradients are off"), context():
            fit(Net(), gpu_mode=mode)
    with torch.inference_mode():
        model = Net()
    with pytest.raises(ConfigurationError, match=r"^model\.inner\.0\.weight was created in torch\.inference_mode\(\)"):
        fit(model, gpu_mode=mode)
    fit(copy.deepcopy(model))


@pytest.mark.parametrize("mode", ["single", "dp"])
def test_an_attribute_on_another_device_is_named(mode: str) -> None:
    model = Net()
    model.scale = torch.ones(8, device="meta")
    text = r"The run is on cpu, but model\.scale is on meta\. .*register_buffer"
    with pytest.raises(RuntimeError, match=text):
        fit(model, gpu_mode=mode)
    model.scale = {"x": torch.ones(8, device="meta")}
    with pytest.raises(RuntimeError, match=r"but model\.scale\['x'\] is on meta\."):
        fit(model, gpu_mode=mode)


def test_a_tensor_of_the_criterion_is_named() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.ones(3, device="meta")

        def forward(self, y: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(y * self.weight, target)

    with pytest.raises(RuntimeError, match=r"but criterion\.weight is on meta\."):
        fit(Net(), Weighted())


# What torch says of it, in the loop's process and in a worker.
FULL = [
    "unable to allocate shared memory(shm) for file </torch_12_3>: No space left on device (28)",
    "unable to write to file </torch_12_3>: No space left on device (28)",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.",
]


class Full(Dataset[Any]):
    def __init__(self, text: str, *, as_cause: bool) -> None:
        self.text, self.as_cause = text, as_cause

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        error = RuntimeError(self.text)
        if self.as_cause:
            raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly") from error
        raise error


@pytest.mark.parametrize("as_cause", [False, True])
@pytest.mark.parametrize("text", FULL)
def test_a_full_dev_shm_names_the_remedies(text: str, as_cause: bool) -> None:
    with pytest.raises(RuntimeError, match=r"\nHint: shared memory ran out: .* --shm-size=8g.*num_workers=0") as error:
        fit(Net(), data=Full(text, as_cause=as_cause))
    assert str(error.value).count("shm-size") == 1
    # A rank's error has it already.
    failure = Failure(0, 0, "RuntimeError", str(error.value))
    assert hint(failure) == ""
    assert "num_workers=0" in hint(Failure(0, 0, "RuntimeError", text))


class Cycle(Dataset[Any]):
    """Raises an error that is a context of its own context, as one that was raised again while it was handled."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        first, second = RuntimeError("first"), RuntimeError("second")
        first.__context__, second.__context__ = second, first
        raise first


def test_an_error_with_a_cycle_of_contexts_ends_a_run() -> None:
    with pytest.raises(RuntimeError, match="first"):
        fit(Net(), data=Cycle())


@pytest.mark.parametrize(
    "version, macos_14, use, expected",
    [
        ("2.7.1", True, AmpOptions(torch.float16), r"use_amp with fp16 on mps: .*\(2\.7\.1\) computes in float64"),
        ("2.8.0", True, AmpOptions(torch.float16), torch.float16),
        ("2.8.0", False, AmpOptions(torch.bfloat16), "use_amp='bf16' on mps needs macOS 14 or newer"),
        ("2.8.0", False, AmpOptions(torch.bfloat16, chosen=False), torch.float16),
        ("2.7.1", True, AmpOptions(torch.bfloat16, chosen=False), torch.bfloat16),
    ],
)
def test_precisions_that_an_apple_gpu_has(
    version: str, macos_14: bool, use: AmpOptions, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's sources say: autocast refuses bf16 before macOS 14, and GradScaler used float64 before 2.8."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: macos_14)
    if isinstance(expected, torch.dtype):
        assert use.on(torch.device("mps")).dtype == expected
        return
    with pytest.raises(ConfigurationError, match=expected):
        use.on(torch.device("mps"))


class Shapes(Net):
    """Its forward fails, in training or in an evaluation."""

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self.fails_in = training

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3] if self.training == self.fails_in else x)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("training", [True, False])
def test_errors_about_shapes_name_the_step_and_the_batch(training: bool) -> None:
    model = Shapes(training=training)
    loader = DataLoader(make_data(), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tl = cpu_loop(model, loader, optimizer, validation_loader=loader)
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        tl.fit(num_epochs=1)
    where = "In step 1 (epoch 1)" if training else "In an evaluation"
    assert caught.value.__notes__ == [f"{where}: the batch is [16, 8] float32, [16] int64."]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(
    "hook", ["on_batch_begin", "on_after_gradient_update", "on_after_optimizer_step", "on_batch_end"]
)
def test_errors_of_hooks_name_the_step_that_they_belong_to(hook: str) -> None:
    loop, calls = make_loop(), []

    def fails(*_: Any) -> None:
        calls.append(loop.epoch)
        if len(calls) == 2:
            raise RuntimeError("no more")

    callback = AbstractCallback("fails")
    setattr(callback, hook, fails)
    with pytest.raises(RuntimeError, match="no more") as caught:
        loop.fit(num_epochs=1, callbacks=[callback])
    assert caught.value.__notes__[0].startswith("In step 2 (epoch 1): the batch")


def test_batches_of_all_kinds_are_described() -> None:
    x = torch.zeros(2, 3)
    assert described({"x": x, "names": ["a", "b"]}) == "x: [2, 3] float32, names: list of 2"
    assert described([x] * 9).endswith("and 1 more")
    assert described(object()) == "object"
