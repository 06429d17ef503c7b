"""Find the largest batch that fits into memory in a training step, with the loop's own tensors moved off the GPU."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from trainloop._launch.failures import is_about_memory
from trainloop.callbacks.arguments import count_of
from trainloop.callbacks.base import AbstractCallback
from trainloop.data.loader.loader_copies import copy_loader
from trainloop.data.loader.loaders import is_distributed, is_stream, plain_batches
from trainloop.data.order.samplers import length_of
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.parameters import own_parameters
from trainloop.tools.trial import require_training_parts, trial_of, wrapper_args_of
from trainloop.train_loop.execution.execute import untouched
from trainloop.train_loop.loop import TrainLoop


@dataclass(frozen=True)
class BatchSizes:
    """Result of :func:`find_batch_size`. Sizes are batch sizes per process."""

    tried: dict[int, float | None]
    """Samples per second of one process at each size; ``None`` for sizes that ran out of memory."""
    limit: str
    """Reason why no larger batch was tried, such as ``'memory'``."""

    @property
    def suggestion(self) -> int | None:
        """Largest size that fits into memory; ``None`` if no size fits."""
        return max((size for size, speed in self.tried.items() if speed is not None), default=None)

    def __str__(self) -> str:
        lines = [
            f"batch_size {size}: " + ("out of memory" if speed is None else f"{speed:,.0f} samples/s")
            for size, speed in sorted(self.tried.items())
        ]
        return "\n".join([*lines, f"suggestion: {self.suggestion} ({self.limit})"])


def find_batch_size(
    loop: TrainLoop[Any], *, smallest: int | None = None, largest: int | None = None, steps: int = 3
) -> BatchSizes:
    """Try training steps with repeatedly doubled batch sizes, until memory or data run out.

    The steps run in the mode and on the devices of the loop, with copies of the model and the optimizer, so the loop is
    not changed. After an out-of-memory error, GPU memory is freed. On the CPU each size is tried in a separate process,
    which the kernel may kill for lack of memory. Therefore a script needs ``if __name__ == '__main__':``.

    Parameters
    ----------
    loop : TrainLoop
        Loop whose ``train_loader`` is a ``DataLoader`` with a ``batch_size``.
    smallest : int, optional
        First size. Default: the loader's batch size.
    largest : int, optional
        Last size; never more than each process's shard of the dataset.
    steps : int
        Optimizer steps at each size. The first is not timed.

    Returns
    -------
    BatchSizes
        ``.suggestion`` is the largest size. ``.tried`` has the samples per second of each size, because the largest
        size is not always the fastest.

    Raises
    ------
    ConfigurationError
        For invalid arguments, for a loader without a batch size, and for a loop without ``train_loader`` or
        ``optimizer``. Errors of the model that are not about memory are raised unchanged.

    Examples
    --------
    >>> print(tl.find_batch_size())                                                           # doctest: +SKIP
    """
    require_training_parts(loop, "find_batch_size")
    loader = loop.train_loader
    cuts_batches = is_stream(loader) or plain_batches(loader) is not None
    if not isinstance(loader, DataLoader) or not cuts_batches or not loader.batch_size:
        raise ConfigurationError(
            f"find_batch_size: train_loader is a {type(loader).__name__} without a batch_size, "
            "so there is no size to change. Pass DataLoader(dataset, batch_size=...)."
        )
    smallest, largest = (
        count_of("find_batch_size", name, value, optional=True)
        for name, value in (("smallest", smallest), ("largest", largest))
    )
    steps = count_of("find_batch_size", "steps", steps, 2)
    shards = 1 if is_distributed(loader) else loop.run_config.num_ranks
    samples = None if is_stream(loader) else length_of(loader.sampler)
    most = max(1, samples // shards) if samples is not None else None
    if largest is not None:
        most = min(largest, most or largest)
    size = min(smallest or loader.batch_size, most or smallest or loader.batch_size)
    tried: dict[int, float | None] = {}
    limit = "memory"
    doubtful: list[Exception] = []
    with untouched(loop), _off_the_gpu(loop):
        while size not in tried:
            tried[size] = _samples_per_second(loop, size, steps, doubtful)
            if tried[size] is None:
                break
            if most is not None and size >= most:
                limit = "largest" if most == largest else "each process's shard of the dataset"
            size = min(2 * size, most) if most is not None else 2 * size
        if tried[min(tried)] is None:  # the first size was too large: try smaller ones
            while size > 1 and tried[size] is None:
                size //= 2
                tried[size] = _samples_per_second(loop, size, steps, doubtful)
    found = BatchSizes(tried, limit)
    if doubtful and found.suggestion is None:  # the size is not the cause
        raise doubtful[-1]
    return found


def _samples_per_second(loop: TrainLoop[Any], size: int, steps: int, doubtful: list[Exception]) -> float | None:
    """Return samples per second; ``None`` if memory ran out. ``doubtful`` gets an error that may have another cause."""
    clock = _Clock()
    loader: Any = loop.train_loader
    # Only whole batches are timed; a stream may have fewer samples than one.
    drop_last = loader.batch_sampler.drop_last or not is_stream(loader)
    batches = BatchSampler(loader.batch_sampler.sampler, size, drop_last)
    trial = trial_of(loop, copy_loader(loader, batch_size=size, batch_sampler=batches))
    arguments = wrapper_args_of(loop)
    # The kernel may kill the process that runs out of main memory.
    trial.note(runs_apart=loop.run_config.devices[0].type == "cpu" and loop.gpu_mode == "single")
    try:
        # A small dataset is repeated, because only the batch size matters.
        trial.fit(num_iterations=steps, callbacks=[clock], **arguments)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError and WorkerFailedError are RuntimeErrors
        about_memory = is_about_memory(error)
        if about_memory is False:
            raise
        if about_memory is None:
            doubtful[:] = [error.with_traceback(None)]  # whose frames refer to the tensors that didn't fit
        return None
    finally:
        del trial
        gc.collect()  # the traceback's frames refer to the tensors that didn't fit
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return size / max(clock.seconds_per_step, 1e-9)


class _Clock(AbstractCallback):
    """Time the steps after the first. If memory runs out, let the kernel kill this process first."""

    def __init__(self) -> None:
        super().__init__("find_batch_size")
        self.seconds_per_step = 0.0
        self._began = 0.0

    def on_train_begin(self) -> None:
        if has_ranks(self.train_loop_obj.gpu_mode):
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if loop.device.type == "cuda":
            torch.cuda.synchronize(loop.device)
        if loop.global_step == 1:
            self._began = time.perf_counter()
        else:
            self.seconds_per_step = (time.perf_counter() - self._began) / (loop.global_step - 1)


@contextlib.contextmanager
def _off_the_gpu(loop: TrainLoop[Any]) -> Iterator[None]:
    """Move the loop's own model and optimizer to host memory in the block, since a real training has only one copy."""
    tensors = [*own_parameters(loop.model), *loop.model.buffers()]
    for optimizer in optimizers_of(loop.optimizer):
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
    moved = [(tensor, tensor.device) for tensor in {id(t): t for t in tensors}.values() if tensor.device.type == "cuda"]
    for tensor, _ in moved:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor, device in moved:
            tensor.data = tensor.data.to(device)
