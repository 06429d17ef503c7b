"""Prepare the model as one rank runs it: on its device, in its wrapper, with or without mixed precision."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainloop import distributed
from trainloop._support.nested import parts_of, paths_of
from trainloop._support.reduction import is_compiled
from trainloop._support.rng import derive_seed
from trainloop.devices import has_ranks
from trainloop.distributed.tensors import copy_from_first
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import all_optimizers
from trainloop.optim.parameters import criterion_modules, modules_beside, move_to, own_parameters
from trainloop.parallel import TTDataParallel, TTDistributedDataParallel, sync_batchnorm
from trainloop.parallel.ddp import WeighingDataParallel, comm_hooks_of
from trainloop.parallel.dp import expect_samples
from trainloop.parallel.sharded.shards import bit_sums, dense_parts
from trainloop.train_loop.arguments.options import FitJob
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.run.recompute import recomputing


class Scaler(torch.amp.GradScaler):
    """torch's scaler, which accepts a step in which an optimizer's parameters have no gradient."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        try:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except ValueError as error:  # its text: Attempting to unscale FP16 gradients
            raise of_half_precision(optimizer) from error
        # Without an entry, torch's step() and update() raise "No inf checks were recorded".
        return found or {found_inf.device: found_inf}


def of_half_precision(optimizer: torch.optim.Optimizer) -> ConfigurationError:
    """Return an error for gradients that a scaler can't unscale, because they are float16 themselves."""
    return ConfigurationError(
        "use_amp with fp16 trains float32 parameters and converts them where they are used, but parameters of the "
        f"{type(optimizer).__name__} are float16. Convert the model back, model.float(), and leave out .half() or "
        "torch_dtype=torch.float16. Or use model.bfloat16() with use_amp=False."
    )


@dataclass
class Placement:
    """The model as a rank calls it."""

    model: Any
    """The user's model."""
    wrapper: Any
    """The object whose ``get_loss`` training calls: the model itself, or its wrapper."""
    device: torch.device
    """Device of this rank's batches."""
    autocast: AbstractContextManager[Any]
    """Context of each forward; can be entered repeatedly."""
    scaler: torch.amp.GradScaler
    """Gradient scaler; disabled, and therefore without effect, unless the dtype is fp16."""
    synced: sync_batchnorm.SyncedLayers | None = None
    """The BatchNorm layers that normalise over all ranks; None if that is not requested."""
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    """Optimizers whose state is placed with the model; an optimizer is followed by those that it contains."""
    registered: dict[tuple[nn.Module, str], tuple[Any, Any]] = field(default_factory=dict)
    """What was registered while the run was placed, by module and name: the parameter before, and the newest value."""
    wrap: Callable[..., Any] | None = None
    """Function that creates the wrapper; takes further arguments of the wrapper's constructor."""

    collective: ClassVar[bool] = False
    """True if each forward is an exchange between all ranks, so that all ranks must run the same number of forwards."""
    scaler_type: ClassVar[type[torch.amp.GradScaler]] = Scaler

    @property
    def expects(self) -> Callable[[int], None] | None:
        """In ``dp``, a function that takes a batch's number of samples, to be called before the wrapper's method."""
        return partial(expect_samples, self.wrapper) if isinstance(self.wrapper, TTDataParallel) else None

    def wrap_again(self) -> None:
        """In ``ddp``, wrap the model again for the parameters that now require gradients. Collective, between steps."""
        assert self.wrap is not None
        # DDP reads requires_grad once, in its constructor. The old wrapper is freed first, since its hooks on the
        # parameters would reduce gradients, too.
        before, self.wrapper = self.wrapper, self.model
        hooks: Sequence[tuple[Any, Any]] = ()
        if isinstance(before, TTDistributedDataParallel):
            before.release()
            hooks = comm_hooks_of(before)
        # The ranks' weights are already equal, so DDP need not send rank 0's. (torch 2.6 always sends them.)
        knows = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters
        self.wrapper = self.wrap(**({"init_sync": False} if knows else {}))
        for hook, state in hooks:
            self.wrapper.register_comm_hook(state, hook)

    def steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Prepare for optimizers that a callback has assigned; only sharded placements have to."""

    def check_parameters(self) -> None:
        """Raise an error if a parameter was changed in a way that the wrapper can't follow."""

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callback's hook, with an error for changes of parameters that would have no effect."""
        return hook

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context of an optimizer's step, with an error for changes that would have no effect."""
        return _NOTHING

    def release(self) -> None:
        """Free the resources of ``ddp``'s wrapper, after the last step."""
        if isinstance(self.wrapper, TTDistributedDataParallel):
            self.wrapper.release()

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for forward and backward: ``ddp`` reduces gradients only in a step's last micro-batch."""
        if last or not isinstance(self.wrapper, TTDistributedDataParallel):
            return _NOTHING
        return self.wrapper.no_sync()

    def batchnorm_ranks(self, counts: list[int] | None, i: int) -> AbstractContextManager[Any]:
        """Return a context in which synchronised BatchNorm covers the ranks that have the step's ``i``-th micro-batch.

        Parameters
        ----------
        counts : list of int or None
            Number of micro-batches of each rank in this step, if they differ.
        i : int
        """
        if counts is None or self.synced is None:
            return _NOTHING
        return sync_batchnorm.participating(self.synced, [rank for rank, n in enumerate(counts) if n > i])

    def share_buffers(self) -> None:
        """In ``ddp``, send rank 0's buffers to all ranks. Called before steps without the wrapper, and at the end."""
        if isinstance(self.wrapper, TTDistributedDataParallel):
            self.wrapper.share_buffers()

    def make_whole(self, keeping: Iterable[Any], added: dict[str, Any]) -> None:
        """At the end of ``fsdp``, gather sharded tensors that objects keep, and those in ``added``, for the caller."""

    @property
    def evaluated(self) -> Any:
        """Model for evaluation: in ``ddp`` without its wrapper, since ranks may have different numbers of batches."""
        return self.model if isinstance(self.wrapper, TTDistributedDataParallel) else self.wrapper


_NOTHING: AbstractContextManager[Any] = nullcontext()


@contextmanager
def placed(loop: LoopState, job: FitJob | None, *, joined: bool) -> Iterator[Placement]:
    """Put a loop's model on its device and into its wrapper; afterwards, undo all changes except the device.

    Parameters
    ----------
    loop : LoopState
        In ``ddp`` and ``fsdp``, this process is a rank of an initialised process group.
    job : FitJob or None
        Options of a training run; None for evaluation only, which needs no wrapper in ``ddp``.
    joined : bool
        True if a launcher started this rank. Then every rank of ``fsdp`` gets the trained values, instead of only one
        rank per host.
    """
    model, criterion, mode, options = loop.model, loop.criterion, loop.gpu_mode, loop.options
    optimizers = all_optimizers(loop.optimizer)
    # Only dp uses several devices in one process.
    devices = loop.run_config.devices if mode == "dp" else [loop.run_config.devices[loop.process.local_rank]]
    device = devices[0]
    wrapper_args = loop.wrapper_args if job is not None or mode != "ddp" else None
    syncs = job is not None and loop.sync_batchnorm and has_ranks(mode) and loop.world_size > 1
    synced = sync_batchnorm.SyncedLayers() if syncs else None
    with ExitStack() as undo:
        if device.type == "cuda":
            # This is for code that uses device='cuda' without an index: user code, and loaders that pin memory in a
            # thread. At the end, set_device() would create a context on the GPU that was current before.
            undo.enter_context(torch.cuda.device(device))
        if mode != "fsdp":  # in fsdp, a device may not have room for the full model
            move_to(model, device)
        # Class weights and the like are buffers.
        for module in modules_beside(model, criterion):
            move_to(module, device)
        for optimizer in optimizers if mode != "fsdp" else ():
            move_state(optimizer, device)
        if mode == "ddp" and job is None and (joined or loop.num_nodes > 1):
            # Each of these processes has a model of its own; in training, DDP sends rank 0's values.
            _take_first_ranks_values([model, *criterion_modules(criterion)])
        # Only here is the GPU known, with a context in which its capabilities can be queried.
        amp = options.amp.on(device)
        if synced is not None:
            undo.callback(synced.revert)
            synced.take([model, *criterion_modules(criterion)])
        if job is not None and options.checkpoint_modules is not None:
            undo.enter_context(recomputing(model, options.checkpoint_modules))
        if options.compile_args is not None or options.compiles_step or any(map(is_compiled, model.modules())):
            notice_hooks(undo)
        if options.compile_args is not None:
            # Compile in place: torch.compile(model) would create another module, with prefixed keys in checkpoints.
            model.compile(**options.compile_args)
            undo.callback(setattr, model, "_compiled_call_impl", None)
        kind: type[Placement] = Placement
        stepped = optimizers if job is not None else []
        wrap: Callable[..., Any] = partial(_in_wrapper, model, mode, devices, wrapper_args)
        if mode == "fsdp":
            from trainloop.train_loop.run.fsdp_placement import ShardedPlacement, sharded  # imports this module

            kind = ShardedPlacement
            values_to = "none" if job is None or not job.gather else "all" if joined else "host"
            wrapper = undo.enter_context(sharded(model, stepped, wrapper_args or {}, values_to=values_to))
        else:
            wrapper = wrap()
        place = kind(
            model,
            wrapper,
            device,
            _NOTHING if amp.dtype is None else torch.autocast(device.type, amp.dtype),
            kind.scaler_type(device.type, enabled=amp.scales, **amp.scaler),
            synced,
            stepped,
            wrap=wrap,
        )
        undo.callback(place.release)
        yield place


def notice_hooks(undo: ExitStack) -> None:
    """Let graphs that are compiled from now on notice hooks that modules get later, until ``undo`` is closed."""
    if torch._dynamo.config.skip_nnmodule_hook_guards:  # torch's default
        undo.enter_context(torch._dynamo.config.patch(skip_nnmodule_hook_guards=False))


def _take_first_ranks_values(modules: Iterable[nn.Module]) -> None:
    """Overwrite parameters and buffers with rank 0's if any rank has others. Collective.

    Raises
    ------
    ConfigurationError
        If a rank has other modules than rank 0.
    """
    named = [(n, t) for module in modules for n, t in (*module.named_parameters(), *module.named_buffers())]
    dense = [part for _, tensor in named for part in dense_parts(tensor.detach())]
    forms = derive_seed(repr([(n, t.dtype, [*t.shape]) for n, t in named]), *(part.numel() for part in dense))
    everyone = distributed.exchange_ints([forms, derive_seed(*bit_sums(dense))], "the beginning of an evaluation")
    odd = next((rank for rank, theirs in enumerate(everyone) if theirs[0] != everyone[0][0]), None)
    if odd is not None:
        raise ConfigurationError(
            f"the model or the criterion has other parameters or buffers on rank {odd} than on rank 0. Create the same "
            "model on every rank."
        )
    if any(theirs != everyone[0] for theirs in everyone):
        copy_from_first(dense)


_DEVICES = re.compile(r"on the same device|on the expected device|on device meta|meta tensor|should be the same")


def explain_device(error: RuntimeError, model: nn.Module, criterion: Any, device: torch.device) -> None:
    """Add to torch's error about devices the names of the model's and criterion's tensors on another device."""
    if not _DEVICES.search(str(error)):
        return
    found = []
    for owner, root in (("model", model), ("criterion", criterion)):
        for path, module in root.named_modules(prefix=owner) if isinstance(root, nn.Module) else ():
            for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
                # A value may be a container, such as a list of tensors; dicts of parameters and submodules are skipped.
                parts = {"": value} if isinstance(value, torch.Tensor) else {}
                if not name.startswith("_") and parts_of(value) is not None:
                    parts = dict(zip(paths_of(value), parts_of(value) or ()))
                for key, part in parts.items():
                    if isinstance(part, torch.Tensor) and part.device.type != device.type:
                        found.append(f"{path}.{name}{key} is on {part.device}")
    if found:
        error.args = (
            f"{error} The run is on {device}, but {', '.join(found[:3])}. A tensor attribute is moved only if it is a "
            "buffer: self.register_buffer('name', tensor).",
        )


def _in_wrapper(
    model: nn.Module, mode: str, devices: list[torch.device], wrapper_args: dict[str, Any] | None, **further: Any
) -> Any:
    if mode == "dp":
        which = {"device_ids": devices} if devices[0].type == "cuda" else {"devices": len(devices)}
        return TTDataParallel(model, **{**which, **(wrapper_args or {})})
    if mode == "ddp" and wrapper_args is not None and any(p.requires_grad for p in own_parameters(model)):
        # Gradients are views of the reduced buckets, so they are copied neither into the buckets nor out of them.
        arguments: dict[str, Any] = {"gradient_as_bucket_view": True, **wrapper_args, **further}
        if devices[0].type == "cuda":
            arguments.setdefault("device_ids", [devices[0]])
        return WeighingDataParallel(model, **arguments)
    return model


def move_state(optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> None:
    """Move the optimizer's state to ``device`` (default: each parameter's device).

    Step counters stay on the CPU, as in torch's ``Optimizer.load_state_dict``. Fused and capturable kernels are the
    exception: they read step counters on the device.
    """
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            home = parameter.device if device is None else device
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                counts = key == "step" and not on_device
                stays = not torch.is_tensor(value) or (counts and value.device.type == "cpu")
                if not stays and value.device != home:
                    state[key] = value.to(home)
