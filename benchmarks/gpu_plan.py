"""The plan for the first day on a GPU: what ``make gpu`` does in ten minutes, in this order, and what it should find.

The most probable failures and the cheapest checks come first. ``benchmarks.gpu_checks`` and ``benchmarks.gpu_parts``
do the work. This module needs nothing but Python.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUDGET_S", "PLAN", "SIMULATED", "Item"]

BUDGET_S = 600.0


@dataclass(frozen=True)
class Item:
    """One item of the plan."""

    limit_s: float
    """Seconds after which it is ended, by force, and the next one begins."""
    expected: str
    """What it should find."""
    otherwise: str
    """What to do if it finds something else."""


PLAN = {
    "something runs": Item(
        40,
        "the loss falls in single, and the validation gives a number",
        "read the error, and run python -m trainloop doctor; torch.cuda.get_arch_list() must contain this GPU",
    ),
    "tests/gpu: data and training": Item(
        90,
        "all pass",
        "run the test that fails alone; test_the_host_waits_for_nothing with CUDA_LAUNCH_BLOCKING=0",
    ),
    "odd batches": Item(
        40,
        "every kind trains: none in 'refused'",
        "data/batch/batches.py: _is_dense must be False for the kind, so that it is neither pinned nor recorded",
    ),
    "memory of epochs": Item(
        40,
        "as much is reserved after epoch 10 as after epoch 2",
        "data/batch/batches.py: _copy_stream must return one stream for all epochs; see torch.cuda.memory_snapshot()",
    ),
    "synchronisations in ten steps": Item(
        30, "0", "torch.cuda.set_sync_debug_mode('error') in on_batch_begin names the line that waits"
    ),
    "compile='step' is one graph": Item(
        75,
        "no warning, and the losses of an eager run within 1e-3",
        "TORCH_LOGS=cudagraphs,perf_hints says why a graph is skipped; whole_step.py has the loop's part",
    ),
    "default device": Item(
        60,
        "single and ddp train under torch.set_default_device('cuda')",
        "the error names the tensor that was created without a device: give it one",
    ),
    "contexts": Item(
        60,
        "the caller of ddp has no context on a GPU, before and after; 'ours' is 0",
        "TORCH_SHOW_CPP_STACKTRACES=1, and a breakpoint on torch.cuda._lazy_init in the caller",
    ),
    "steps that fp16 skips": Item(
        60,
        "as many as a hand-written loop skips, or fewer",
        "gradients.py: _usual keeps losses near the scale of a mean; print scaler.get_scale() after each step",
    ),
    "pinned memory and out of memory": Item(
        40,
        "pinned bytes below 1.6 times the model; the memory of a batch that does not fit is free again",
        "checkpoint/plain.py: pinned_like; _launch/failures.py: is_about_memory must know the text of the error",
    ),
    "kernels a step": Item(
        40,
        "at most one more than a hand-written loop for each parameter, and 20",
        "compare torch.profiler's tables of both loops by name",
    ),
    "two GPUs": Item(
        90,
        "ddp on two GPUs has the weights of one process within 1e-6; left out with one GPU",
        "NCCL_DEBUG=INFO; tests/ranks/parity/test_parity.py has the same comparison with Gloo",
    ),
    "MLP": Item(60, "ratio 1.1 or less", "benchmarks/step.py finds the costly part on the CPU"),
    "MLP, a loader that pins": Item(60, "ratio 1 or less", "benchmarks/step.py finds the costly part on the CPU"),
    "tests/gpu: the others": Item(200, "all pass", "run the test that fails alone, with -p no:cacheprovider -x"),
    "MLP, compile='step'": Item(75, "ratio 0.5 or less", "see the item about one graph"),
    "ResNet-18, bf16": Item(45, "ratio 1.01 or less", "compare torch.profiler's tables of both loops"),
    "GPT-2 small, bf16": Item(60, "ratio 1.01 or less", "compare torch.profiler's tables of both loops"),
    "prefetch from pinned memory": Item(45, "ratio 1 or less", "the copies must overlap with kernels in a trace"),
    "dp on one GPU": Item(30, "ratio about 1", "benchmarks/step.py"),
    "ddp with one rank": Item(45, "ratio 1.1 or less", "compare torch.profiler's tables of both loops"),
    "two ranks on one device, Gloo": Item(45, "a time: it runs", "the backend must be gloo"),
    "a checkpoint's stall": Item(30, "later_ms about megabytes / 20", "the copies must be from and to pinned memory"),
    "the first fit's start": Item(45, "below 10 s", "benchmarks/starting.py"),
}

SIMULATED = (
    *("something runs", "odd batches", "memory of epochs", "default device", "contexts", "steps that fp16 skips"),
    *("pinned memory and out of memory", "two GPUs"),
)
"""Items that ``make test-simulated-gpu`` runs on the simulated device. The others need real kernels or CUDA graphs."""
