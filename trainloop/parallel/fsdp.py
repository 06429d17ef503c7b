"""Fully sharded data parallelism: FSDP2 for models with a ``get_loss``; attributes and gradients of units and parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from trainloop._support.forks import guard_process
from trainloop._support.keywords import refuses_unknown
from trainloop._support.nested import map_parts, tensors_of
from trainloop._support.user_line import described_names
from trainloop.devices import whole_number
from trainloop.distributed.objects import backend_of, cpu_group
from trainloop.distributed.tensors import copy_from_first
from trainloop.errors import ConfigurationError
from trainloop.model import yields_losses
from trainloop.optim.parameters import own_parameters
from trainloop.parallel.added import AddedParameters
from trainloop.parallel.containers import with_dicts_of, with_multi_losses, with_plain_dicts, without_dict_classes
from trainloop.parallel.sharded.arguments import HandsBack
from trainloop.parallel.sharded.misuse import (
    WatchedForwards,
    explain_sharded,
    refuse_freed_input,
    refuse_gradients_of_shards,
    refuse_other_parameters,
    refuse_shards_in_functions,
)
from trainloop.parallel.sharded.shards import References, is_sharded, stays_whole, storage_address
from trainloop.parallel.sharded.undoing import (
    CompleteUnits,
    GatheredUnits,
    can_undo,
    check_cpu,
    correct_operations,
    drop_gathered_gradients,
    parameter_groups,
    reduce_late_gradients,
    undo_fully_shard,
)
from trainloop.parallel.sharded.units import check_parameters, units_of
from trainloop.parallel.transparent import (
    Transparent,
    attributes_of,
    check_not_lazy,
    check_same_model,
    check_sendable,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Marks:
    """Attributes that code has set on a unit's parameters: torch gathers them into parameters without these.

    Parameters
    ----------
    unit : nn.Module
        A unit whose parameters are sharded, and have the attributes.
    """

    def __init__(self, unit: nn.Module) -> None:
        found = [(part, name, p) for part in unit.modules() for name, p in part._parameters.items()]
        self._marked = [(part, name, p) for part, name, p in found if p is not None and attributes_of(p)]

    def copy(self, *_: Any) -> None:
        """Give the parameters that the unit's forward uses the attributes that the shards have now."""
        for part, name, shard in self._marked:
            if (gathered := part._parameters.get(name)) is not None and gathered is not shard:
                vars(gathered).update(attributes_of(shard))


class _Call:
    """A function that the wrapper's forward runs instead of the module's forward, and the function's result."""

    __slots__ = ("output", "run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.output: Any = None


class _Flags:
    """Keep ``requires_grad`` of a unit's shards up to date when the model sets the flags while the unit is gathered.

    FSDP reads the flags of shards only. It would compute no gradients for a parameter that was frozen while it was
    sharded, and unfrozen while it was gathered, as for steps of Langevin dynamics in ``get_loss``.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._shards = [
            (part._parameters, name, p)
            for part in unit.modules()
            for name, p in part._parameters.items()
            if p is not None and is_sharded(p)
        ]

    def follow(self, *_: Any) -> None:
        """Give shards the flags of the gathered parameters that are now in their places."""
        for parameters, name, shard in self._shards:
            now = parameters.get(name)
            if now is not shard and now is not None and now.requires_grad != shard.requires_grad:
                shard.requires_grad_(now.requires_grad)

    def without_gathered(self, output: Any) -> Any:
        """Copy those tensors of nested outputs that share the memory of gathered parameters, which is freed soon."""
        gathered = (parameters.get(name) for parameters, name, _ in self._shards)
        places = {storage_address(p) for p in gathered if p is not None and not is_sharded(p)} - {0}

        def apart(value: Any) -> Any:
            if isinstance(value, Tensor):
                strided = not value.is_nested and not is_sharded(value)
                return value.clone() if strided and storage_address(value) in places else value
            return map_parts(apart, value)

        return apart(output)


class TTFullyShardedDataParallel(Transparent, nn.Module):
    """A module under PyTorch's ``fully_shard`` (FSDP2) that runs a model's ``get_loss`` the way it runs ``forward``.

    Parameters and gradients are sharded over the ranks, and so is the state of optimizers that you create afterwards
    from ``wrapper.parameters()``. A rank keeps its shards, and gathers only the unit that is running. The module is
    changed in place, and its parameters become ``DTensor``.

    ``wrapper.get_loss(...)``, ``get_loss_eval`` and ``get_predictions`` are forward passes of the root unit, no matter
    which submodules they call or how often. If ``get_loss`` yields its losses, each loss is one pass. You can read and
    write every other attribute, property and method of the model through the wrapper. Methods other than these three
    bypass FSDP, so they see the root unit's parameters sharded.

    Parameters
    ----------
    module : nn.Module
        Any module without lazy parameters. If it was built under ``torch.device('meta')``, the wrapper initializes it,
        unit by unit, with the ``reset_parameters`` of its submodules.
    shard : type, list of types or callable, optional
        Modules to shard as separate units: their classes, or a function ``module -> bool`` or ``(name, module) ->
        bool``. Default: the repeated blocks, which are modules of one class in a ``ModuleList`` or ``Sequential``. The
        root unit has the rest. With an empty list, the root unit has all parameters.
    mesh : DeviceMesh, optional
        Mesh with one dimension, or with two named dimensions: replicas, and the shards of each replica (HSDP). Default:
        all ranks.
    replicas : int
        Number of copies of the model, each sharded over a part of the ranks. Use it instead of ``mesh``.
    reshard_after_forward : bool or int
        If True, the gathered parameters of a unit are freed between its forward and its backward (except for the root
        unit). If it is an int, the parameters are instead sharded over that many ranks during this time.
    mp_policy, offload_policy : optional
        ``torch.distributed.fsdp.MixedPrecisionPolicy`` and ``OffloadPolicy``.
    init_sync : bool
        If True, the parameters and buffers of the mesh's first rank are first sent to the mesh's other ranks, one at a
        time (as in DDP); only the first rank needs values, and the others' model may be on the meta device. Use
        ``False`` if the ranks' values are already equal.

    Raises
    ------
    ConfigurationError
        If there is no process group; if the module has lazy parameters or is already sharded; if the ranks' modules
        differ in names, order, shapes, dtypes or flags; if a unit's parameters have several dtypes; if only the first
        rank's model is on the meta device; or if an argument is invalid.

    Notes
    -----
    Collective: every rank must create its wrapper with the same arguments. **Every forward, even in evaluation, is
    an exchange between all ranks**, so all ranks must call the same units in the same order. **All ranks' losses
    must depend on the same parameters**: torch packs the gradients that a rank has, and would add up those of
    different parameters. (In ``fit``, losses may depend on different parameters of a unit.) Scalar and empty
    parameters can't be sharded: each rank has the full parameter, and the backward averages its gradient. If a
    block shares a parameter with a module outside of it, the block is part of the unit that contains both. The name
    ``module`` and the names of ``FSDPModule``'s methods (``unshard``, ``set_requires_gradient_sync``, ...) refer to
    the wrapper.

    Examples
    --------
    >>> wrapper = TTFullyShardedDataParallel(model, shard=[Block])                             # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(wrapper.parameters())                                     # doctest: +SKIP
    >>> wrapper.get_loss(batch, criterion, wrapper.device).backward()                           # doctest: +SKIP
    """

    reshard: Callable[[], None]
    """Free the root unit's gathered parameters. (A method of ``FSDPModule``, a base that ``fully_shard`` adds.)"""

    @refuses_unknown
    def __init__(
        self,
        module: nn.Module,
        *,
        shard: Any = None,
        mesh: DeviceMesh | None = None,
        replicas: int = 1,
        reshard_after_forward: bool | int = True,
        mp_policy: Any = None,
        offload_policy: Any = None,
        init_sync: bool = True,
    ) -> None:
        _check_module(module)
        can_undo()
        correct_operations()
        guard_process()
        super().__init__()
        self.module = module
        units = [*units_of(module, shard), ("", self)]
        mesh = _mesh(module, mesh, replicas)
        for dim in range(mesh.ndim) if init_sync else ():
            check_same_model(module, "TTFullyShardedDataParallel", mesh.get_group(dim))
        device = _device_of(mesh)
        if device.type == "cpu":
            check_cpu()
        self._tt_mesh = mesh
        self._tt_units: list[tuple[str, Any]] = units
        self._tt_watched: WatchedForwards | None = None
        self._tt_complete: CompleteUnits | None = None
        options: dict[str, Any] = {"mesh": mesh}
        options.update({"mp_policy": mp_policy} if mp_policy is not None else {})
        options.update({"offload_policy": offload_policy} if offload_policy is not None else {})
        on_meta = [tensor.is_meta for tensor in (*module.parameters(), *module.buffers())]
        seed, complete = _seed_of_first(mesh, on_meta) if init_sync or any(on_meta) else (None, False)
        sends = init_sync and not complete  # values that are created here are already equal on all ranks
        if complete and not all(on_meta):
            raise ConfigurationError(
                "TTFullyShardedDataParallel: the first rank's model is on the meta device, but this rank's is not. "
                "Build it on the meta device on all ranks; or on all but the first, whose values they then get."
            )
        before = dict(module.named_parameters(remove_duplicate=False))
        marks = {name: attributes_of(p) for name, p in before.items()}
        for number, (name, unit) in enumerate(units):
            check_parameters(name or type(module).__name__, _to_shard(unit))
            if any(on_meta):
                _give_memory(unit, device, None if seed is None else seed + number)
            # The root is needed again as soon as backward begins: by default torch keeps it gathered.
            root = unit is self and reshard_after_forward is True
            further: dict[str, Any] = {} if root else {"reshard_after_forward": reshard_after_forward}
            value = partial(_of_first_rank, mesh=mesh, device=device) if sends else None
            _shard_unit(unit, {**further, **options}, value, restores=init_sync)
        self._tt_groups = [group for _, unit in units for group in parameter_groups(unit)]
        self._tt_gathered = GatheredUnits(self._tt_groups if mesh.size(-1) > 1 else [])
        whole = [p for p in own_parameters(module) if stays_whole(p)]  # in one order on all ranks, unlike in a set
        if any(marks.values()):
            for name, p in module.named_parameters(remove_duplicate=False):
                vars(p).update(marks.get(name, {}))
        self._tt_hooks: list[Any] = self._hooks_of_units(marked=any(marks.values()))
        self._tt_until_begun = [
            unit.register_forward_pre_hook(self._prepare_units, prepend=True) for _, unit in units[:-1]
        ]
        self._tt_flags = _Flags(self)
        self._tt_names = {id(p): name for name, p in module.named_parameters() if is_sharded(p)}
        for buffer in module.buffers() if sends else ():
            buffer.data = _of_first_rank(buffer.data, mesh, device).to(buffer.device)
        for p in whole:
            p.data = (_of_first_rank(p.data, mesh, device) if sends else p.data).to(device)
            trains = p.requires_grad
            p.requires_grad_(True)  # a frozen parameter accepts no hook, but may be unfrozen later
            self._tt_hooks.append(p.register_post_accumulate_grad_hook(self._average))
            p.requires_grad_(trains)
        self._become_transparent()
        if torch.__version__ < TorchVersion("2.11"):
            # The first pass gives padded shards other memory (2.7 does, 2.11 does not). A callback that has found them
            # before it, such as an average of the weights, would read the initial values from then on.
            self._prepare_units()
        self._tt_references = References(module, before)
        self._tt_references.begin()
        self._tt_whole = set(map(id, whole))
        self._tt_frozen: list[nn.Parameter] = []
        self._tt_added = AddedParameters()

    def _hooks_of_units(self, *, marked: bool) -> list[Any]:
        """Register the hooks of units, the root's last; ``marked``: parameters have attributes of the user's."""
        units, below = [unit for _, unit in self._tt_units], self._tt_units[:-1]
        hooks: list[Any] = [HandsBack(unit) for unit in units]
        hooks += [unit.register_forward_pre_hook(_Flags(unit).follow, prepend=True) for _, unit in below]
        hooks += [refuse_other_parameters(name, unit) for name, unit in below]  # runs before the others
        hooks += [refuse_freed_input(name, unit) for name, unit in below]
        hooks += [unit.register_forward_pre_hook(_Marks(unit).copy) for unit in units if marked]
        return hooks

    # -- forward -----------------------------------------------------------------------------------------------------

    def _prepare_units(self, *_: Any) -> None:
        """Run an empty pass of the root, which prepares all units: FSDP requires that the root runs first.

        Called where a callback calls a submodule before the first forward, such as a policy that plays an episode.
        """
        with torch.no_grad():
            self(_Call(lambda: None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            # Memory that is allocated for gathered parameters in this mode could not be written in a later training.
            with torch.inference_mode(False), torch.no_grad():
                return self(*args, **kwargs)
        if self._tt_until_begun:
            for hook in self._tt_until_begun:
                hook.remove()
            self._tt_until_begun = []
        averages = self._tt_complete is None and self._tt_mesh.size() > 1
        if averages and (self._tt_added or self._tt_frozen):
            self._refuse_added()
        for group in self._tt_groups:
            # The last forward has left the root gathered. Without a backward since then (predictions with gradients, a
            # loss that is skipped), it would miss what the optimizer has changed in the shards.
            group.reshard()
            # A backward within forward (adversarial inputs, a gradient penalty) would free parameters that it needs.
            group.reshard_after_backward = False
        complete = self._tt_complete
        try:
            if complete is not None:
                complete.inside_forward = True
            with refuse_gradients_of_shards(self._tt_names):
                output = super().__call__(*args, **kwargs)
        except (RuntimeError, AssertionError) as error:
            explain_sharded(error)
            raise
        finally:
            if complete is not None:
                complete.inside_forward = False
            for group in self._tt_groups:
                group.reshard_after_backward = True
        needs_gradients = [tensor.requires_grad for tensor in tensors_of(output)]
        if not torch.is_grad_enabled() or (needs_gradients and not any(needs_gradients)):
            # Without a backward, nothing frees the gathered parameters, which would be stale after the next step.
            self.reshard_units()
            drop_gathered_gradients(self._tt_groups)  # of a backward that an evaluation has run itself
        return output

    def _refuse_added(self) -> None:
        """Raise an error if the model has got parameters whose gradients this wrapper would not average.

        In evaluation too, where a unit's forward would put back its own parameter. (A loop averages gradients of added
        parameters itself.)
        """
        own = [p for group in self._tt_groups for p in group.fsdp_params]
        known = {id(p.sharded_param) for p in own} | {id(getattr(p, "_unsharded_param", None)) for p in own}
        known |= self._tt_whole | {id(p) for p in self._tt_frozen if not p.requires_grad}
        self._tt_frozen += self._tt_added.refuse(self.module, "TTFullyShardedDataParallel", known, ())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        with nullcontext() if self._tt_watched is None else self._tt_watched.refusing_lost_changes():
            if args and type(args[0]) is _Call:
                call = args[0]
                call.output = call.run(*args[1:], **kwargs)
                output = with_plain_dicts(call.output)
            else:
                output = self.module(*args, **kwargs)
        self._tt_flags.follow()
        if torch.is_grad_enabled():
            if self._tt_watched is not None and not self._tt_watched.ended:
                refuse_shards_in_functions(output, self._tt_names)
            reduce_late_gradients(output, self._tt_groups)
        else:
            output = self._tt_flags.without_gathered(output)
        return output

    def _run_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.module, method)
        if yields_losses(self.module, method):
            return self._yield_losses(function(*args, **kwargs))
        # torch rebuilds the containers of a batch, but can't rebuild each subclass of dict (defaultdict).
        call = _Call(lambda *own, **named: function(*with_dicts_of(own, args), **with_dicts_of(named, kwargs)))
        opened = without_dict_classes(args), without_dict_classes(kwargs)
        return with_multi_losses(self(call, *opened[0], **opened[1]), call.output)

    def _yield_losses(self, losses: Generator[Any, None, None]) -> Iterator[Any]:
        """Run a ``get_loss`` that yields its losses: each loss is a separate forward pass of the root."""
        while True:
            call = _Call(lambda: next(losses, losses))
            output = with_multi_losses(self(call), call.output)
            if output is losses:
                self.reshard_units()  # no backward follows that would free the parameters
                return
            yield output

    # -- for the training loop ----------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also between a forward pass and its backward pass, while units are whole."""
        super().zero_grad(set_to_none)
        for shard in (p.sharded_param for group in self._tt_groups for p in group.fsdp_params):
            if shard.grad is not None:
                shard.grad = None if set_to_none else torch.zeros_like(shard.grad)

    def reshard_units(self) -> None:
        """In every unit, free the parameters that are still gathered because no backward followed.

        A forward leaves the root gathered, and a backward within a forward, as for gradients by inputs, leaves all
        units gathered. This needs no exchange.
        """
        for _, unit in self._tt_units:
            unit.reshard()

    @contextmanager
    def keeping_gathered(self) -> Iterator[None]:
        """Within, a backward leaves the parameters gathered that are gathered before it, for another backward.

        These are the root's and, after a backward within the forward (as for gradients by inputs), those of all units:
        the second derivatives need parameters for which torch does not gather them again.
        """
        groups = [group for group in self._tt_groups if group.is_unsharded]
        for group in groups:
            group.reshard_after_backward = False
        try:
            yield
        finally:
            for group in groups:
                group.reshard_after_backward = True

    @contextmanager
    def reaching(self, shards: set[int]) -> Iterator[None]:
        """Within, a backward reaches only these shards, by ``id``: the gradients of others are not kept."""
        complete = self._tt_complete
        if complete is None:
            yield
            return
        before = complete.counted
        complete.counted = shards if before is None else shards & before
        try:
            yield
        finally:
            complete.counted = before

    def complete_units(self) -> None:
        """From now on, let ranks' losses depend on different parameters of a unit.

        Those that this rank's losses do not reach get zeros; before each step, :meth:`drop_unreached` must be called.
        Gradients of parameters that are not sharded are no longer averaged.
        """
        self._tt_complete = self._tt_complete or CompleteUnits(self._tt_groups)

    def drop_unreached(self, parameters: Sequence[Tensor]) -> None:
        """Drop the gradients of parameters that no rank's losses have reached since the last call. Collective.

        Raises
        ------
        ConfigurationError
            If some ranks' losses depend on a unit, and others' do not, or on units in another order. The message names
            parameters.
        """
        assert self._tt_complete is not None
        mine, order = self._tt_complete.take_reached()
        shards = [p for p in parameters if is_sharded(p)]
        reached = [id(p) in mine for p in shards]
        units = [{id(p.sharded_param) for p in group.fsdp_params} for group in self._tt_groups]
        runs = [i in order for i in range(len(units))]
        digest = zlib.crc32(repr((order, self.take_gathered())).encode())
        numbers = [*reached, *runs, *(not one for one in runs), digest, -digest]
        flags = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=cpu_group())
        *told, highest, lowest = flags.tolist()
        for p, anywhere in zip(shards, told[: len(shards)], strict=True):
            if not anywhere:
                p.grad = None
        some, others = told[len(shards) : -len(units)], told[-len(units) :]
        odd = [unit for unit, one, other in zip(units, some, others, strict=True) if one and other]
        what = ""
        if odd:
            names = [self._tt_names.get(key, "a parameter") for unit in odd for key in unit]
            what = f"depend on {described_names(sorted(names))}, and those of other ranks on no parameter of this unit"
        elif highest != -lowest:
            what = "depend on the model's units in another order than those of other ranks"
        if what:
            raise _of_different_units(f"the losses of some ranks {what}")

    def take_gathered(self) -> int:
        """Return a number for the order in which this rank has gathered units since the last call."""
        return self._tt_gathered.take()

    def compare_gathered(self, everyone: Sequence[int]) -> None:
        """Raise ConfigurationError if ranks have gathered different units; ``everyone``: all ranks' numbers."""
        for ranks in self._tt_mesh.mesh.reshape(-1, self._tt_mesh.size(-1)).tolist():
            if len({everyone[rank] for rank in ranks}) > 1:
                raise _of_different_units("in an evaluation, some ranks have called other units than others")

    def watch_forwards(self, number: int) -> None:
        """Raise ConfigurationError if one of the next training forwards changes a parameter: such changes are lost."""
        self._tt_watched = WatchedForwards(self._tt_units, number)

    def share_buffers(self) -> None:
        """Copy the buffers of the mesh's first rank to its other ranks, as DDP's forward does. Collective."""
        _send_from_first(self.module.buffers(), self._tt_mesh)

    def _average(self, parameter: Tensor) -> None:
        """Average an unsharded parameter's gradient over the ranks.

        Called after every backward; averaging an already averaged gradient has no effect.
        """
        if self._tt_complete is not None:  # not every rank may have this gradient
            return
        assert parameter.grad is not None
        parameter.grad /= self._tt_mesh.size()
        for dim in range(self._tt_mesh.ndim):
            dist.all_reduce(parameter.grad, group=self._tt_mesh.get_group(dim))

    def former_parameters(self) -> dict[int, nn.Parameter]:
        """Return the parameters of the time before the sharding by the ``id`` of their shards, and by their own."""
        return self._tt_references.of_shards()

    @contextmanager
    def without_references(self) -> Iterator[None]:
        """Let the parameters of the time before the sharding be parameters of their own, and not stand for shards."""
        self._tt_references.end()
        try:
            yield
        finally:
            self._tt_references.begin()

    def take_off(self, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
        """Undo the sharding in place, without an exchange. The wrapper is unusable afterwards.

        Parameters
        ----------
        parameters : mapping from str to nn.Parameter
            New parameters, by the names that the replaced parameters have in ``module.named_parameters()``.

        Returns
        -------
        nn.Module
            The module.
        """
        self._tt_references.end()
        for hook in [*self._tt_hooks, *self._tt_until_begun]:
            hook.remove()
        if self._tt_watched is not None:
            self._tt_watched.end()
        self.reshard_units()
        before = dict(self.module.named_parameters())
        new = {id(before[name]): parameter for name, parameter in parameters.items() if name in before}
        for part in [*self.module.modules(), self]:
            undo_fully_shard(part)
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) in new:
                    part._parameters[name] = new[id(parameter)]
                    vars(new[id(parameter)]).update(attributes_of(parameter))
        return self.module


# -- construction ------------------------------------------------------------------------------------------------------


def _mesh(module: nn.Module, mesh: Any, replicas: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    world_size = dist.get_world_size()
    number = whole_number(replicas)
    if number is None or number < 1 or world_size % number:
        raise ConfigurationError(
            f"replicas={replicas!r}: must be an int that divides the number of ranks ({world_size})."
        )
    replicas = number
    if mesh is not None:
        if replicas != 1:
            raise ConfigurationError(
                f"replicas={replicas} with a mesh: a two-dimensional mesh sets the number of replicas itself. Pass "
                "either replicas or mesh."
            )
        if not isinstance(mesh, DeviceMesh):
            raise ConfigurationError(f"mesh={mesh!r}: must be a torch.distributed.device_mesh.DeviceMesh or None.")
        if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
            raise ConfigurationError(
                f"mesh={mesh!r}: must have one dimension, or two with names, such as init_device_mesh('cpu', (2, 2), "
                "mesh_dim_names=('replicate', 'shard'))."
            )
        return mesh
    on_gpu = "nccl" in dist.get_backend() or any(p.is_cuda for p in own_parameters(module))
    kind = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    if replicas == 1:
        return init_device_mesh(kind, (world_size,))
    return init_device_mesh(kind, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def _device_of(mesh: Any) -> torch.device:
    return torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _of_different_units(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"gpu_mode='fsdp': {what}, so that ranks have exchanged different units. Let each rank call all units, in the "
        "same order, and each loss depend on them: for a head that a batch does not use, add 0 * head(x).sum() to the "
        "loss. Or make them part of the root unit by fit(fsdp_model_args={'shard': [Block]}), with the "
        "classes of the other units, [] for none. Or use gpu_mode='ddp', ddp_model_args={'find_unused_parameters': "
        "True}."
    )


def _check_module(module: nn.Module) -> None:
    check_not_lazy(module, "TTFullyShardedDataParallel")
    check_sendable(module, "TTFullyShardedDataParallel")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            "TTFullyShardedDataParallel: there is no process group. Call torch.distributed.init_process_group() in "
            "every process first, or let TrainLoop(..., gpu_mode='fsdp') start the processes."
        )
    if any(is_sharded(p) for p in own_parameters(module)):
        raise ConfigurationError(
            f"TTFullyShardedDataParallel: {type(module).__name__} has DTensor parameters, so it is already "
            "sharded. Pass a model that is not sharded."
        )


def _shard_unit(
    unit: nn.Module, options: dict[str, Any], value: Callable[[Tensor], Tensor] | None, *, restores: bool
) -> None:
    """Shard the parameters of a unit, with the values that ``value`` returns for theirs.

    With ``restores``, the parameters themselves, which are no longer in the module, keep their values for other owners.
    """
    from torch.distributed.fsdp import fully_shard  # the import takes half a second, and most programs never shard

    originals = [(p, p.data) for p in _to_shard(unit).values()]
    for p, data in originals:
        p.data = data if value is None else value(data)
        if not p.is_contiguous():
            p.data = p.data.contiguous()  # e.g. channels_last: a shard is cut from contiguous rows
    if ignored := {p for p in own_parameters(unit) if stays_whole(p)}:
        options = {**options, "ignored_params": ignored}  # torch 2.6 does not know it
    try:
        fully_shard(unit, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigurationError(f"TTFullyShardedDataParallel: {error}") from error
    for p, data in originals if restores else ():
        p.data = data


def _of_first_rank(own: Tensor, mesh: Any, device: torch.device) -> Tensor:
    """Return the values of the mesh's first rank, in new memory. Collective."""
    can_send = backend_of(own.device.type) is not None
    sent = own.clone(memory_format=torch.contiguous_format) if can_send else own.to(device, copy=True).contiguous()
    _send_from_first([sent], mesh)
    return sent


def _send_from_first(tensors: Iterable[Tensor], mesh: Any) -> None:
    """Overwrite tensors with the values on the mesh's first rank.

    (Ranks outside the mesh may have another model part.)
    """
    tensors = list(tensors)
    for dim in range(mesh.ndim):
        copy_from_first(tensors, mesh.get_group(dim))


# -- models on the meta device -----------------------------------------------------------------------------------------


def _seed_of_first(mesh: Any, on_meta: Sequence[bool]) -> tuple[int | None, bool]:
    """Return a seed that the mesh's first rank has drawn, and True if all of its tensors are on the meta device.

    With the seed, all ranks cut their shards from the same initial values. It is None if no tensor is on that device.
    Collective.
    """
    seed = int(torch.randint(2**31, (), device="cpu")) if any(on_meta) else -1
    first = torch.tensor([seed, int(all(on_meta))], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    _send_from_first([first], mesh)
    seed, complete = first.tolist()
    return (None, False) if seed < 0 else (seed, bool(complete))


def _to_shard(unit: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in unit.named_parameters() if not stays_whole(p) and not is_sharded(p)}


def _give_memory(unit: nn.Module, device: torch.device, seed: int | None) -> None:
    """Allocate those tensors of a unit that are on the meta device; with a seed, initialize them."""
    parts = list(filter(_is_on_meta, unit.modules()))
    for part in parts:
        if seed is not None and not callable(getattr(part, "reset_parameters", None)):
            raise ConfigurationError(
                f"TTFullyShardedDataParallel: {type(part).__name__} is on the meta device, but has no "
                "reset_parameters() to initialize its tensors. Write this method, or build the model on the CPU."
            )
    made: dict[int, nn.Parameter] = {}
    for part in parts:
        for name, p in part._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:  # a tied parameter is created once
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                part._parameters[name] = made[id(p)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)
    if seed is not None:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for part in parts:
                part.reset_parameters()  # type: ignore[operator]  # checked above


def _is_on_meta(part: nn.Module) -> bool:
    """Return True if a parameter or buffer of the module itself, not of its submodules, is on the meta device."""
    tensors = (*part._parameters.values(), *part._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)
