"""Lower precision with ``gpu_mode='fsdp'`` beside ``ddp``: autocast in bf16 and fp16, units in bf16, and both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import Tower
from test_parity_fsdp import adam, data, distance
from torch.distributed.fsdp import MixedPrecisionPolicy

from trainloop import TrainLoop


def fitted(mode: str, **given: Any) -> TrainLoop[Any]:
    """In float32; has a scalar, which each rank holds whole beside the shards."""
    model = Tower()
    fit = given.pop("fit", {"ddp_model_args": {"find_unused_parameters": True}} if mode == "ddp" else {})
    loop = cpu_loop(model, data(26, 6), adam(model), gpu_mode=mode, devices=2, seed=3, gradient_clip_norm=0.1, **given)
    loop.fit(num_epochs=2, **fit)
    return loop


@pytest.mark.long
def test_lower_precision_equals_that_of_ddp() -> None:
    units = {"fsdp_model_args": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}}
    with TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2).ranks():
        full = fitted("ddp").model.state_dict()
        for amp in ("bf16", "fp16", {"init_scale": 2.0**40, "growth_interval": 3}):  # the last overflows at first
            ours, theirs = fitted("fsdp", use_amp=amp), fitted("ddp", use_amp=amp)
            assert distance(ours.model.state_dict(), theirs.model.state_dict()) < 1e-6, amp
            assert ours.scaler_state == theirs.scaler_state, amp
            assert ours.history["loss"] == theirs.history["loss"], amp
            assert distance(ours.model.state_dict(), full) > 1e-6, amp
            if isinstance(amp, dict):
                assert 0 < ours.scaler_state["scale"] < amp["init_scale"]
        # Autocast within units of the same dtype, as Accelerate does it, is as far from the truth as either.
        alone, both = fitted("fsdp", fit=units), fitted("fsdp", fit=units, use_amp="bf16")
        assert 1e-6 < distance(both.model.state_dict(), full) < 2 * distance(alone.model.state_dict(), full)
