"""``fsdp`` on GPUs: the numbers of one process, shards alone on the device, lower precision, state on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.sharded_models import Tower, words
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import ModelCheckpoint
from trainloop.callbacks.checkpoints.run_checkpoints import BackgroundWrite
from trainloop.checkpoint import checkpoints, load

pytestmark = pytest.mark.gpu

GPUS = min(2, torch.cuda.device_count()) or 1


class Residents(AbstractCallback):
    """Where rank 0's shards and the optimizer's state are, with their dtypes, and how much of the model they hold."""

    def __init__(self) -> None:
        super().__init__("Residents")
        self.facts: dict[str, Any] = {}

    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        shards = [p.to_local() for p in loop.model.parameters() if hasattr(p, "to_local")]
        state = [v.to_local() for own in loop.optimizer.state.values() for v in own.values() if hasattr(v, "to_local")]
        total = sum(p.numel() for p in loop.model.parameters() if p.ndim)
        self.facts = {
            "shards": {t.device.type for t in shards},
            "state": {t.device.type for t in state},
            "dtypes": {t.dtype for t in shards},
            "held": sum(t.numel() for t in shards) / total,
        }


def fitted(mode: str, ranks: int, callbacks: list[Any] | None = None, dtype: Any = torch.float64, **fit: Any) -> Any:
    model = Tower().to(dtype)
    loop = TrainLoop(
        model,
        DataLoader(TensorDataset(*words(0, 24)), batch_size=12 // ranks, shuffle=True),
        optimizer=torch.optim.AdamW(model.parameters(), 0.01),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode=mode,
        accelerator="cpu" if mode == "single" else "cuda",
        **({} if mode == "single" else {"devices": ranks}),
        seed=3,
        progress_bar=False,
        gradient_clip_norm=0.5,
    )
    for _ in range(2):  # the second goes on with the optimizer's state
        loop.fit(num_epochs=1, callbacks=callbacks, **fit)
    return loop


def furthest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs)


def test_shards_are_on_their_gpus_and_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    residents = Residents()
    loop = fitted("fsdp", GPUS, [residents, ModelCheckpoint(tmp_path, async_save=True)])
    single = fitted("single", 1)
    assert furthest(loop.model, single.model) < 1e-9
    assert all(p.device.type == "cpu" for p in loop.model.parameters())  # where it came from
    assert residents.facts["shards"] == residents.facts["state"] == {"cuda"}
    assert residents.facts["held"] <= 1 / GPUS + 0.1
    assert loop.evaluate_loss_on_train_set() == pytest.approx(single.evaluate_loss_on_train_set())
    restored = Tower().double()
    restored.load_state_dict(load(tmp_path)["model"])
    assert furthest(restored, loop.model) == 0


def test_units_are_gathered_in_bf16_and_stepped_in_float32() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    residents = Residents()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    loop = fitted("fsdp", GPUS, [residents], torch.float32, fsdp_model_args={"mp_policy": policy})
    assert residents.facts["dtypes"] == {torch.float32}
    distance = furthest(loop.model, fitted("single", 1, dtype=torch.float32).model)
    assert 0 < distance < 0.1


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_checkpoint_is_written_on_its_ranks_own_gpu() -> None:
    seen: list[int] = []
    with torch.cuda.device(1):
        torch.zeros(1, device="cuda")
        BackgroundWrite(lambda: seen.append(torch.cuda.current_device()), step=1).wait()
    assert seen == [1]


def test_shards_and_state_are_on_the_host_between_their_uses(tmp_path: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    residents, arguments = Residents(), {"offload_policy": CPUOffloadPolicy()}
    callbacks = [residents, ModelCheckpoint(tmp_path)]
    loop = fitted("fsdp", GPUS, callbacks, fsdp_model_args=arguments)
    assert residents.facts["shards"] == residents.facts["state"] == {"cpu"}
    assert furthest(loop.model, fitted("single", 1).model) < 1e-9
    first = checkpoints(tmp_path)[0].path
    residents.facts = {}
    loop.fit(num_epochs=2, callbacks=callbacks, fsdp_model_args=arguments, resume_from=first)
    assert residents.facts["shards"] == residents.facts["state"] == {"cpu"}
