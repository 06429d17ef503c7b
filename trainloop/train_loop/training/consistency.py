"""Check that all ranks of a training have the same settings, weights and states; name what differs.

Settings are compared before any rank waits for another. Ranks that ``fit`` starts have the same settings. With
torchrun, Slurm or several hosts, each script runs independently. A rank with other arguments, loaders or checkpoints
would wait for steps and exchanges that never happen, and then report only another rank's closed connection.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop._launch.rank_process import started_by_launch
from trainloop._support.reduction import sum_rule
from trainloop._support.user_line import described_names, warn_or_print
from trainloop.callbacks.base import AbstractCallback, HooksOfRanks, Saver
from trainloop.data.loader.loaders import NO_LOADER, Shared, check_shared
from trainloop.distributed.objects import names_that_differ
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import parameters_of
from trainloop.optim.parameters import criterion_modules, own_parameters
from trainloop.optim.states import divides_state
from trainloop.parallel import TTDistributedDataParallel
from trainloop.parallel.ddp import comm_hooks_of
from trainloop.parallel.sharded.shards import bit_sums, is_sharded
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.training.trained import changing_buffers

_LOADERS = ("train_loader", "validation_loader", "test_loader")
_CAUSES_OF_OTHER_WEIGHTS = (
    "Either gradients were not averaged (a layer that torch.utils.checkpoint recomputes several times in a step "
    "needs use_reentrant=False), or only some ranks changed their weights. Compute losses in get_loss, and change "
    "parameters on every rank in the same way: in a callback, since get_loss is not called on a rank without "
    "samples of an epoch's last step. If the first forward pass initializes parameters, call the model once before "
    "fit. If a launcher started the processes, an optimizer that has a state before fit needs the same state in all "
    "of them. An optimizer or a hook that draws random numbers must draw the same on all ranks: keep a "
    "torch.Generator or random.Random with a fixed seed in it, and pass it to each draw; or, in a subclass, call "
    "super().step() within torch.random.fork_rng(), after torch.manual_seed(number of the step)."
)
# What may differ between ranks without an error, and the warning about it.
_STATES = (
    "the optimizer's states of {names} differ between ranks. Checkpoints, and the optimizer after fit, have those of "
    "rank 0 only, so that a resumed run, or a second fit, takes other steps. If each rank steps a part of the "
    "parameters and sends it to the others, let all ranks step all parameters, as in the optimizer's version for a "
    "single device: all ranks have the same gradients."
)
_CALLBACKS = (
    "the callbacks' parameters {names} differ between ranks, as each rank trains them with its own samples. "
    "Checkpoints, and the callbacks after fit, have those of rank 0 only. Make the parameters a part of the model, "
    "with an optimizer of their own in a MultiOptimizer, or average their gradients over the ranks before each step "
    "(trainloop.distributed.all_reduce)."
)
_BUFFERS = (
    "get_loss has changed {names} differently on each rank, as each has a part of the samples. Rank 0's buffers "
    "replace those of all ranks before each step (a criterion's: at the end), so the other ranks' changes are lost. "
    "Gather what changes them, self.all_gather(values, concat=True), so that all ranks make the same change. If each "
    "rank should have its own values, use plain attributes (see carried_state)."
)
_MODES = (
    "the modules {names} are in training mode on some ranks and in evaluation mode on others, so that ranks compute "
    "different losses. Call train() and eval() on every rank."
)


@contextmanager
def share_refusals(*, enabled: bool) -> Iterator[None]:
    """If the block raises a ``ConfigurationError``, report it to ranks that wait in :func:`check_same_on_all_ranks`.

    Ranks that ``fit`` has started need no report: the process that started them sees the error and ends the others.
    """

    try:
        yield
    except ConfigurationError:
        if enabled and not started_by_launch():
            with suppress(Exception):  # ranks that failed in another way have ended
                distributed.gather_object(None)
        raise


def requested_settings(run: TrainingRun, *, gather: bool, resume: dict[str, Any] | None) -> dict[str, Any]:
    """Return this rank's settings as plain types, for :func:`check_same_on_all_ranks`.

    Parameters
    ----------
    run : TrainingRun
        The training, after its feed was created.
    gather : bool
        Argument of ``fit``.
    resume : dict, optional
        State to resume from.
    """
    loop = run.loop
    length = f"num_epochs={loop.num_epochs}" if loop.num_epochs else f"num_iterations={loop.num_iterations}"
    sums = "means" if sum_rule(loop.model, loop.criterion) is None else "sums"
    place = {"epoch": loop.epoch, "global_step": loop.global_step} if resume is None else resume["place"]
    shared = [run.feed.shared]
    for name in _LOADERS[1:]:
        loader = getattr(loop, name) if loop.end_auto_eval else None
        shared.append(NO_LOADER if loader is None else run.shared_of(loader, name))
    return {
        "arguments": [
            f"fit({length})",
            f"fit(grad_accumulation={loop.grad_accumulation})",
            f"fit(gather={gather})",
            f"TrainLoop(end_auto_eval={loop.end_auto_eval})",
            f"TrainLoop(gradient_clip_norm={loop.gradient_clip_norm})",
            f"TrainLoop(sync_batchnorm={loop.sync_batchnorm})",
            f"a criterion of class {type(loop.criterion).__qualname__}, with {sums} of losses",
        ],
        "place": [place["epoch"], place["global_step"]],
        "turns": [[may_log for _, may_log in run.hooks.in_turn(name)] for name in ("on_epoch_end", "on_train_end")],
        "hooks": HooksOfRanks.of(loop.callbacks)._asdict(),
        "savers": [type(callback).__qualname__ for callback in loop.callbacks if isinstance(callback, Saver)],
        "loaders": [list(one) for one in shared],
    }


def check_same_on_all_ranks(mine: dict[str, Any]) -> HooksOfRanks:
    """Raise an error on all ranks if ranks would not do the same steps and evaluations. Collective: one exchange.

    Parameters
    ----------
    mine : dict
        Result of :func:`requested_settings`.

    Returns
    -------
    HooksOfRanks
        What the callbacks of any rank do.

    Raises
    ------
    ConfigurationError
        If settings differ; the message names the first difference, and the first rank that has it.
    """
    everyone = distributed.gather_object(mine)
    refused = next((rank for rank, theirs in enumerate(everyone) if theirs is None), None)
    if refused is not None:
        raise ConfigurationError(
            f"rank {refused} rejected its arguments. See that rank's own error, and fix its cause. All ranks stop, "
            "because they take each step together."
        )
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for argument, of_first in zip(theirs["arguments"], first["arguments"], strict=True):
            if argument != of_first:
                raise ConfigurationError(
                    f"{argument} on rank {rank}, but {of_first} on rank 0. All ranks take each step together, so pass "
                    "the same value on every rank."
                )
    epoch, step = first["place"]
    for rank, theirs in enumerate(everyone):
        if theirs["place"] != first["place"]:
            other_epoch, other_step = theirs["place"]
            raise ConfigurationError(
                f"rank {rank} would resume after epoch {other_epoch} and step {other_step}, but rank 0 after epoch "
                f"{epoch} and step {step}. All ranks take each step together: on every rank, resume from the same "
                "checkpoint (for resume_from='last', in a folder that all hosts share), and make the same calls of fit."
            )
    for i, name in enumerate(_LOADERS):
        check_shared([Shared(*theirs["loaders"][i]) for theirs in everyone], name)
    for rank, theirs in enumerate(everyone):
        if theirs["savers"] != first["savers"]:
            own, of_first = (", ".join(one["savers"]) or "none" for one in (theirs, first))
            raise ConfigurationError(
                f"callbacks that write checkpoints: {own} on rank {rank}, but {of_first} on rank 0. A checkpoint has a "
                "part of every rank's state, and rank 0 alone writes it, so pass the same of these callbacks on every "
                "rank."
            )
    hooks = {name: any(theirs["hooks"][name] for theirs in everyone) for name in first["hooks"]}
    return HooksOfRanks(**{**hooks, "alike": all(theirs["turns"] == first["turns"] for theirs in everyone)})


class SameWeights:
    """Compares the ranks' weights, bit for bit, and what else decides their steps.

    Parameters
    ----------
    model : nn.Module
    criterion : callable
        Returns the current criterion.
    """

    def __init__(self, model: nn.Module, criterion: Callable[[], Any]) -> None:
        self._model, self._criterion = model, criterion
        self._warned: set[str] = set()

    def check(
        self,
        wrapper: Any,
        beside: Mapping[str, Tensor],
        optimizers: Sequence[Any] = (),
        callbacks: Sequence[AbstractCallback] = (),
        *,
        buffers_too: bool = False,
    ) -> None:
        """Check that all ranks have the same weights. Collective; one exchange of six integers.

        The settings of the optimizers are compared, too, since ranks have different shards of the weights in ``fsdp``.
        The check is skipped if the user has registered a communication hook, which may let ranks differ for some time
        (local SGD). Warn once about a callback's parameter or an optimizer's state that differs, and about a module's
        mode and a buffer (only rank 0's value is kept) if ``buffers_too``.

        Parameters
        ----------
        wrapper
            The model in its wrapper.
        beside : dict
            Parameters that the model does not have, by name.

        Raises
        ------
        ConfigurationError
            If settings or weights differ; the message names the first setting or parameter that differs.
        """
        in_ddp = isinstance(wrapper, TTDistributedDataParallel)
        if in_ddp and comm_hooks_of(wrapper):
            return
        ignored = wrapper.parameters_to_ignore if in_ddp else ()
        named: dict[str, Tensor] = {  # in fsdp, those that are whole on each rank
            name: p
            for name, p in self._model.named_parameters()
            if name not in ignored and type(p) is nn.Parameter and not is_sharded(p)
        }
        named.update(beside)
        buffers = self._buffers() if buffers_too and (not in_ddp or wrapper.broadcast_buffers) else {}
        settings = _settings_of(optimizers)
        of_callbacks = _of_callbacks(callbacks, {id(p) for p in (*own_parameters(self._model), *beside.values())})
        if not named and not buffers and not settings and not of_callbacks:
            return
        sums = _sums_of(named)
        others: dict[str, Mapping[str, int]] = {
            _STATES: _states_of(optimizers, {id(p): name for name, p in named.items()}),
            _CALLBACKS: _sums_of(of_callbacks),
            _BUFFERS: _sums_of(buffers),
            _MODES: self._modes() if buffers_too else {},
        }
        compared = (settings, [*sums.values()], *others.values())
        digests = distributed.exchange_ints([zlib.crc32(repr(one).encode()) for one in compared])
        settings_differ, weights_differ, *differs = (len(set(digest)) > 1 for digest in zip(*digests, strict=True))
        if settings_differ:  # a cause of different weights
            _raise_different(settings)
        for (warning, values), differ in zip(others.items(), differs, strict=True):
            if differ and warning not in self._warned:
                self._warned.add(warning)
                names = names_that_differ(values)
                if names and distributed.is_global_zero():
                    warn_or_print(warning.format(names=described_names(names)))
        if weights_differ:
            self._raise_other_weights(named, sums)

    def _raise_other_weights(self, named: Mapping[str, Tensor], sums: Mapping[str, int]) -> None:
        """Raise an error that names the first parameter that is different on another rank. Collective."""
        everyone = distributed.exchange_ints([*sums.values()])
        name = next(name for name, of_ranks in zip(sums, zip(*everyone, strict=True)) if len(set(of_ranks)) > 1)
        odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        values = named[name].detach()
        distance = (distributed.all_reduce(values, "max") - distributed.all_reduce(values, "min")).abs().max()
        part = dict(self._model.named_modules()).get(name.rpartition(".")[0])
        causes = _CAUSES_OF_OTHER_WEIGHTS
        if getattr(part, "max_norm", None) is not None:
            causes = (
                "An embedding with max_norm changes its weight in forward, on each rank for the rank's own samples. "
                "Leave max_norm out and scale rows in a callback's on_after_optimizer_step."
            )
        raise ConfigurationError(
            f"the ranks' weights differ: {name} differs by up to {float(distance):.3g} between rank 0 and rank "
            f"{', '.join(map(str, odd))}. {causes}"
        )

    def _modes(self) -> dict[str, bool]:
        """Return which modules of the model and the criterion are in training mode."""
        roots = [("model", self._model), *(("criterion", one) for one in criterion_modules(self._criterion()))]
        return {
            f"{path.removeprefix('model.')} ({type(module).__name__})": module.training
            for prefix, root in roots
            for path, module in root.named_modules(prefix=prefix)
        }

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the model and the criterion that ``get_loss`` may change, by name."""
        of_model = {id(buffer) for buffer in self._model.buffers()}
        return changing_buffers(self._model) | {
            f"criterion.{name}": buffer
            for module in criterion_modules(self._criterion())
            for name, buffer in changing_buffers(module).items()
            if id(buffer) not in of_model
        }


def _sums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return sums of the tensors' bits, not of values: NaN is equal to itself, and no rounding hides a difference."""
    return dict(zip(tensors, bit_sums(list(tensors.values())), strict=True))


def _of_callbacks(callbacks: Sequence[AbstractCallback], others: set[int]) -> dict[str, Tensor]:
    """Return the parameters that callbacks train, by name: those of modules in their attributes, but not ``others``.

    A callback that runs on one rank only, or that has a state for each rank, may have parameters of its own.
    """
    names = Counter(callback.callback_name for callback in callbacks)
    return {
        f"{callback.callback_name}.{name}" + f" (callback {i})" * (names[callback.callback_name] > 1): parameter
        for i, callback in enumerate(callbacks)
        if callback.device_idx_execution is None and not callback.uses_hook("rank_state_dict")
        for attribute, value in vars(callback).items()
        if isinstance(value, (nn.Module, nn.Parameter))
        for name, parameter in (
            [(attribute, value)]
            if isinstance(value, nn.Parameter)
            else [(f"{attribute}.{name}", p) for name, p in value.named_parameters()]
        )
        if parameter.requires_grad and id(parameter) not in others and type(parameter) is nn.Parameter
    }


def _states_of(optimizers: Sequence[Any], names: dict[int, str]) -> dict[str, int]:
    """Return checksums of the state of parameters in optimizers that are not torch's, by ``name (class)``.

    In such a class, each rank may have the state of some parameters only, as in Muon, and send them to the others.
    """
    found: dict[str, list[Tensor]] = {}
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.optim.") or divides_state(optimizer):
            continue
        for p in parameters_of(optimizer):
            state = optimizer.state.get(p) if id(p) in names else None
            tensors = [t for t in (state.values() if isinstance(state, dict) else ()) if _is_plain_state(t)]
            if tensors:
                found[f"{names[id(p)]} ({type(optimizer).__name__})"] = tensors
    sums = iter(bit_sums([tensor for tensors in found.values() for tensor in tensors]))
    return {name: sum(next(sums) for _ in tensors) for name, tensors in found.items()}


def _is_plain_state(value: Any) -> bool:
    # A subclass, such as torchao's quantized states, may not support the operations of a checksum.
    return type(value) is Tensor and value.is_floating_point() and value.layout == torch.strided


def _settings_of(optimizers: Sequence[Any]) -> list[str]:
    """Return the settings of all parameter groups that are plain values, such as ``lr=0.1 (parameter group 0)``."""
    found = []
    for i, optimizer in enumerate(optimizers):
        which = f" of optimizer {i}" if len(optimizers) > 1 else ""
        for j, group in enumerate(optimizer.param_groups):
            for name in getattr(optimizer, "defaults", ()):
                value = group.get(name)
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()
                if value is None or isinstance(value, (bool, int, float, str, tuple)):
                    found.append(f"{name}={value!r} (parameter group {j}{which})")
    return found


def _raise_different(settings: list[str]) -> None:
    """Raise an error that names the first setting that is different on another rank. Collective."""
    everyone = distributed.gather_object(settings)
    rank, theirs = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    mine, other = next(
        ((a, b) for a, b in zip(everyone[0], theirs, strict=False) if a != b),
        (f"{len(everyone[0])} settings", f"{len(theirs)} settings"),
    )
    raise ConfigurationError(
        f"the ranks' optimizers differ: rank 0 has {mine}, but rank {rank} has {other}. All ranks take the same step, "
        "so set the same values on every rank. Compute them from values that all ranks have, such as tl.history, or "
        "average your own with trainloop.distributed.all_reduce(value, 'mean'). (tl.last_loss is the loss of this "
        "rank's batch.)"
    )
