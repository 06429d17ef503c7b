"""Data parallelism over processes: DistributedDataParallel for models with a ``get_loss``."""

from __future__ import annotations

import re
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from trainloop._support.forks import guard_process
from trainloop._support.keywords import refuses_unknown
from trainloop._support.nested import map_parts, tensors_of
from trainloop._support.reduction import in_place_of
from trainloop.distributed.objects import cpu_group
from trainloop.distributed.tensors import buckets
from trainloop.errors import ConfigurationError
from trainloop.model import yields_losses
from trainloop.optim import MultiLoss
from trainloop.optim.parameters import own_parameters
from trainloop.parallel.added import AddedParameters
from trainloop.parallel.containers import with_multi_losses, with_plain_dicts
from trainloop.parallel.transparent import (
    SharedName,
    Transparent,
    check_not_lazy,
    check_same_model,
    check_sendable,
    check_values,
)

_NOT_COPIED = frozenset(("_tt_hooked", "_tt_added"))  # what a copy makes again


class TTDistributedDataParallel(Transparent, DistributedDataParallel):
    """A ``DistributedDataParallel`` that runs a model's ``get_loss`` the way it runs ``forward``.

    ``wrapper.get_loss(...)``, ``get_loss_eval`` and ``get_predictions`` run inside DDP's own forward, as a single call,
    no matter which submodules they call or how often. Therefore the next backward averages gradients over ranks, and
    buffers have the values of rank 0, as with ``wrapper(...)``. If gradients are disabled, these methods are plain
    calls without any exchange, so ranks may evaluate different numbers of batches.

    If ``get_loss`` yields its losses, so that one optimizer steps after another within a batch, ``wrapper.get_loss``
    yields them too, and each loss is a separate pass of DDP. The backward of one loss leaves the parameters of the
    other losses without gradients, so DDP needs ``find_unused_parameters=True``.

    You can read and write every other attribute, property and method of the model through the wrapper. Methods other
    than these three bypass DDP: if they compute a loss, its gradients are **not** averaged.

    Parameters
    ----------
    module : nn.Module
        Any module, on its final device and without lazy parameters. It need not define all three methods.
    device_ids : list of one int or torch.device, optional
        Device to which inputs are moved. Default: the module's GPU, if the module is on a single GPU.
    output_device : int or torch.device, optional
        As in ``DistributedDataParallel``.
    **ddp_args
        The other arguments of ``DistributedDataParallel``: ``find_unused_parameters``, ``static_graph``,
        ``gradient_as_bucket_view``, ``process_group`` and so on.

    Raises
    ------
    ConfigurationError
        If there is no process group, if the module has lazy parameters, or if the ranks' modules differ in names,
        order, shapes, dtypes or flags of parameters and buffers.
    RuntimeError
        If no parameter requires a gradient; or, in the next forward, if a backward left parameters without a gradient.
        The message names these parameters (see ``find_unused_parameters``).

    Notes
    -----
    Collective: every rank must create its wrapper with the same arguments and call it the same number of times (but see
    :meth:`no_exchange`). Hooks on the module and its submodules fire when these modules run; hooks on the wrapper
    itself fire only for ``wrapper(...)``. The name ``module`` and the names of the methods of
    ``DistributedDataParallel`` (``no_sync``, ``join``, ``register_comm_hook``, ...) refer to the wrapper. If the model
    has an attribute with one of these names, use ``wrapper.module.<name>``.

    Examples
    --------
    >>> wrapper = TTDistributedDataParallel(model)  # doctest: +SKIP
    >>> wrapper.get_loss(batch, criterion, wrapper.device).backward()  # doctest: +SKIP
    """

    # Methods of DistributedDataParallel that this class doesn't use; a model may define methods with these names.
    scatter = SharedName("scatter", DistributedDataParallel.scatter)
    gather = SharedName("gather", DistributedDataParallel.gather)
    to_kwargs = SharedName("to_kwargs", DistributedDataParallel.to_kwargs)

    @refuses_unknown
    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **ddp_args: Any) -> None:
        check_not_lazy(module, "TTDistributedDataParallel")
        check_values(module)
        check_sendable(module, "TTDistributedDataParallel")
        # DDP has the same check, but does not name the module.
        trained = [p for p in own_parameters(module) if p.requires_grad]
        if not trained:
            raise RuntimeError(
                f"TTDistributedDataParallel: no parameter of {type(module).__name__} requires a gradient, so there is "
                "nothing to average over ranks. Unfreeze a parameter, or use the module without the wrapper."
            )
        if "process_group" not in ddp_args and "device_mesh" not in ddp_args and not dist.is_initialized():
            raise ConfigurationError(
                "TTDistributedDataParallel: there is no process group. Call torch.distributed.init_process_group() in "
                "every process first, or let TrainLoop(..., gpu_mode='ddp') start the processes."
            )
        if device_ids is None and output_device is None:
            devices = {p.device for p in own_parameters(module)}
            if len(devices) == 1 and trained[0].is_cuda:
                device_ids = [trained[0].device]
        guard_process()
        if ddp_args.get("init_sync", True):
            mesh = ddp_args.get("device_mesh")
            group = ddp_args.get("process_group") if mesh is None else mesh.get_group(0)
            ignored = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
            if ddp_args.get("broadcast_buffers") is False:  # each rank has its own
                ignored.update(name for name, _ in module.named_buffers())
            check_same_model(module, "TTDistributedDataParallel", group, ignored)
        super().__init__(module, device_ids, output_device, **ddp_args)
        self._tt_exchanges = True
        self._tt_marked = False
        self._tt_static_passes = 0
        self._settle_buckets()
        self._become_transparent()
        self._tt_added = AddedParameters()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle_buckets()
        self._tt_added = AddedParameters()

    def _ddp_init_helper(
        self, parameters: list[Tensor], sparse: list[bool], names: dict[int, str], static_graph: bool
    ) -> None:
        # Last parameters first, since backward computes their gradients first; _settle_buckets uses the same order.
        self._tt_reversed = static_graph or not self.find_unused_parameters
        if self._tt_reversed:
            parameters, sparse = parameters[::-1], sparse[::-1]
            names = {len(parameters) - 1 - index: name for index, name in names.items()}
        super()._ddp_init_helper(parameters, sparse, names, static_graph)
        self._tt_reduced = list(zip(parameters, sparse, strict=True))
        self._tt_kinds = _kinds_of(self._tt_reduced)
        self._tt_frozen = [p for p in own_parameters(self.module) if not p.requires_grad]
        self._tt_hooked = hooked_node(parameters[0])
        for parameter, is_sparse in self._tt_reduced:
            if is_sparse:
                # DDP divides its gradient in place. The gradient shares memory with the gradient of the layer's output,
                # which backward may still have to pass on to other layers (torch 2.6 to 2.15).
                weakref.finalize(self, parameter.register_hook(cloned_gradient).remove)

    def _settle_buckets(self) -> None:
        """Give the buckets their final layout before the first backward.

        DDP reduces the gradients of the first backward in one bucket. It reduces later gradients in several buckets, in
        the order of their arrival. With three ranks or more, the position of a number in a buffer determines the order
        in which Gloo and NCCL add it. So a step's bits would depend on the number of earlier steps in the process, and
        a resumed run would differ. This method tells DDP that gradients arrive in the reverse order of the parameters.
        DDP's next forward then creates the buckets. With ``find_unused_parameters``, DDP keeps its initial layout, and
        this method does nothing.
        """
        if hasattr(self, "reducer"):  # DDP has no reducer if it averages no gradients itself
            self.reducer._push_all_rebuilt_params()

    def _run_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.module, method)
        if not torch.is_grad_enabled() or not self._tt_exchanges:
            args, kwargs = self._moved(args, kwargs)
            return function(*args, **kwargs)
        if yields_losses(self.module, method):
            return self._yield_losses(function(*args, **kwargs), args, kwargs)
        # The body of DistributedDataParallel.forward, with another function in place of the module.
        with (
            torch.autograd.profiler.record_function(f"DistributedDataParallel.{method}"),
            self._first_of_static_graph() if self.static_graph else nullcontext(),
        ):
            args, kwargs = self._pre_forward(*args, **kwargs)
            with self._inside_ddp_forward():
                output = self._as_ddp_output(method, function(*args, **kwargs))
            return with_multi_losses(self._post_forward(with_plain_dicts(output)), output)

    def _as_ddp_output(self, method: str, output: Any) -> Any:
        """Return a method's output, in the form that DDP's forward must return."""
        return output

    def _yield_losses(self, losses: Generator[Any, None, None], args: tuple[Any, ...], kwargs: Any) -> Iterator[Any]:
        """Yield the losses that ``get_loss`` yields, each from a separate forward pass of DDP."""
        while True:
            with torch.autograd.profiler.record_function("DistributedDataParallel.get_loss"):
                # Once per loss, since DDP's reducer expects one backward for each of its forwards.
                self._pre_forward(*args, **kwargs)
                with self._inside_ddp_forward():
                    output = next(losses, losses)
                if output is losses:
                    return
                output = with_multi_losses(self._post_forward(with_plain_dicts(output)), output)
            yield output

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, as ``DistributedDataParallel`` does."""
        if not self._tt_exchanges:
            inputs, kwargs = self._moved(inputs, kwargs)
            return self.module(*inputs, **kwargs)
        with self._first_of_static_graph() if self.static_graph else nullcontext():
            return super().forward(*inputs, **kwargs)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the arguments to the wrapper's GPU, as DDP does, and return them; on the CPU, return them unchanged."""
        if not self.device_ids:
            return args, kwargs
        if self._are_here((args, kwargs)):
            return args, kwargs
        moved_args, moved_kwargs = self.to_kwargs(args, kwargs, self.device_ids[0])
        return moved_args[0], moved_kwargs[0]

    def _are_here(self, value: Any) -> bool:
        """Return True if all tensors are on the wrapper's GPU, in the containers in which torch looks for tensors."""
        if isinstance(value, (Tensor, PackedSequence)):
            device = value.device if isinstance(value, Tensor) else value.data.device
            return bool(device == self.device)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
        return all(map(self._are_here, parts))

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and (
            _kinds_of(self._tt_reduced) != self._tt_kinds
            or hooked_node(self._tt_reduced[0][0]) not in (None, self._tt_hooked)
        ):
            raise ConfigurationError(
                "the dtype or the device of the model's parameters has changed since TTDistributedDataParallel wrapped "
                "it (by .float(), .half() or .to(), for example, even if it was changed back), so gradients would not "
                "be averaged over ranks. Make the change before wrapping or in a copy, or wrap the model again."
            )
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._tt_frozen):
            trained = {id(p) for p in self._tt_frozen if p.requires_grad}
            names = [name for name, p in self.module.named_parameters() if id(p) in trained]
            raise ConfigurationError(
                f"{', '.join(names[:5]) or 'parameters'}: frozen when TTDistributedDataParallel wrapped the model, but "
                "requires gradients now, which would not be averaged over ranks. Unfreeze it before wrapping, or wrap "
                "the model again."
            )
        if self._tt_added and torch.is_grad_enabled():
            known = {id(p) for p, _ in self._tt_reduced} | set(map(id, self._tt_frozen))
            ignored = self.parameters_to_ignore
            self._tt_frozen += self._tt_added.refuse(self.module, "TTDistributedDataParallel", known, ignored)
        # torch rebuilds each container of a batch, which fails with a defaultdict and other subclasses of dict. The
        # loop's batches are on the GPU already, so that torch needn't see them.
        hides = bool(self.device_ids) and self.mixed_precision is None and self._are_here((inputs, kwargs))
        if self._tt_marked:
            self._forget_used_parameters()
        try:
            if hides:
                super()._pre_forward(None)
                return inputs, kwargs
            return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as e:
            raise _explained(e, self) from e

    def _post_forward(self, output: Any) -> Any:
        if not self.static_graph:
            return super()._post_forward(output)
        # With a static graph, the output's tensors start the exchange in the backward. Torch does not look for them in
        # dataclasses and subclasses of dict, such as transformers' outputs: gradients would not be averaged.
        passed = iter(super()._post_forward(list(tensors_of(output))))

        def put(value: Any) -> Any:
            return next(passed) if isinstance(value, Tensor) else map_parts(put, value)

        return put(output)

    @contextmanager
    def _first_of_static_graph(self) -> Iterator[None]:
        """Exchange gradients in the first two backwards of a static graph, even under ``no_sync()``.

        In the first backward, torch's reducer (to 2.15 at least) counts how often each parameter is used. It treats all
        backwards up to the second exchange as the first. Gradient accumulation from the start would therefore fail an
        internal assertion, or wait forever. Averaging parts of a sum of gradients separately gives the same result.
        """
        before = self.require_backward_grad_sync
        if self._tt_static_passes < 2 and torch.is_grad_enabled():
            self._tt_static_passes += 1
            self.require_backward_grad_sync = True
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def release(self) -> None:
        """Remove DDP's hooks from the parameters, and free its buckets and group. The wrapper is unusable afterwards.

        This needs no exchange. If you don't call it, these objects live until the garbage collector breaks the
        wrapper's cycles, possibly after ``destroy_process_group()``. DDP's reducer would then have the last reference
        to the group. In a forked child, the group's destructor would hold the GIL and wait for threads that do not
        exist.
        """
        self._remove_autograd_hooks()
        self.__dict__.update(reducer=None, logger=None, process_group=None, _tt_hooked=None)

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Disable the exchange of gradients and buffers: forward and backward involve only this rank.

        Use it for a step in which some ranks have fewer batches than others, or no batch. ``no_sync()`` is not enough,
        because the first forward under it broadcasts buffers, and would wait for ranks that run no forward. Every rank
        must call :func:`reduce_gradients` after its last backward of the step.
        """
        before, self._tt_exchanges = self._tt_exchanges, False
        self.passed_by()
        try:
            yield
        finally:
            self._tt_exchanges = before

    def passed_by(self) -> None:
        """Note that all ranks run backward passes without this wrapper, before its next forward."""
        self._tt_marked = self.find_unused_parameters and not self.static_graph

    def _forget_used_parameters(self) -> None:
        """Run an exchange of zeros, so that DDP forgets which parameters the passes without it have used.

        With ``find_unused_parameters``, torch's reducer (to 2.15 at least) notes the parameters that get a gradient in
        any backward, and clears its notes only after an exchange. A parameter that the next step does not use would
        therefore be an internal error ("Encountered gradient which is undefined, but still allreduced").
        """
        self._tt_marked = False
        before = self.require_backward_grad_sync, self.require_forward_param_sync
        gradients = [
            (p, p.grad.clone() if self.gradient_as_bucket_view and p.grad is not None else p.grad)
            for p, _ in self._tt_reduced
        ]
        self.require_backward_grad_sync, self.require_forward_param_sync = True, False  # buffers are not sent again
        for parameter, is_sparse in self._tt_reduced:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            parameter.grad = zeros.to_sparse(1) if is_sparse else zeros
        try:
            super()._pre_forward()
            with self._inside_ddp_forward():
                used = next(p for p, is_sparse in self._tt_reduced if p.requires_grad and not is_sparse)
                zero = used.sum() * 0
            self._post_forward(zero).backward()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self.require_backward_grad_sync, self.require_forward_param_sync = before

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, unless ``broadcast_buffers=False``. Collective."""
        if self.broadcast_buffers and self._has_buffers():
            self._sync_buffers()

    def share_buffers_early(self) -> None:
        """Copy rank 0's buffers to all ranks now if the next forward would, which then does not. Collective."""
        if self.will_sync_module_buffers():
            self._sync_buffers()
            self.require_forward_param_sync = False  # until the end of the forward

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next forward copies rank 0's buffers to all ranks."""
        return bool(super().will_sync_module_buffers()) and self._has_buffers()

    def _has_buffers(self) -> bool:
        """Return True if there are buffers to share now. DDP's list is outdated if the last one was removed."""
        return any(name not in self.parameters_to_ignore for name, _ in self.module.named_buffers())

    def check_reduced(self) -> None:
        """Check that the last backward averaged the gradients of all parameters over the ranks.

        DDP itself reports missing gradients only at the next forward. By then, an optimizer step has used gradients
        that differ between ranks, and after the last step there is no next forward.

        Raises
        ------
        RuntimeError
            If parameters got no gradient. The message names them, and the argument that allows missing gradients.
        """
        try:
            self._check_reducer_finalized()
        except RuntimeError as e:
            raise _explained(e, self) from e


class WeighingDataParallel(TTDistributedDataParallel):
    """A ``TTDistributedDataParallel`` that averages four numbers over the ranks along with a step's gradients.

    The numbers are the gradient of an extra parameter of the wrapper, which is part of DDP's last bucket, so they need
    no additional exchange. Like all gradients, they add up over the micro-batches of a step.
    """

    _tt_carrier: Tensor
    _tt_numbers: Tensor

    def _ddp_init_helper(
        self, parameters: list[Tensor], sparse: list[bool], names: dict[int, str], static_graph: bool
    ) -> None:
        exact = all(p.dtype is torch.float64 for p in parameters)
        dtype = torch.float64 if exact else torch.float32
        carrier = torch.zeros(4, dtype=dtype, device=parameters[0].device, requires_grad=True)
        # Set through __dict__, since the carrier must not be a parameter of the module.
        self.__dict__.update(_tt_carrier=carrier, _tt_numbers=torch.zeros_like(carrier, requires_grad=False))
        owner = weakref.ref(self)
        # No gradient arrives from a loss of a MultiLoss that the carrier is not part of.
        carrier.register_hook(lambda own: None if own is None else owner()._tt_numbers)  # type: ignore[union-attr]
        names = {0: "(the step's weight)", **{index + 1: name for index, name in names.items()}}
        super()._ddp_init_helper([carrier, *parameters], [False, *sparse], names, static_graph)

    def _as_ddp_output(self, method: str, output: Any) -> Any:
        if method != "get_loss":
            return output
        if isinstance(output, tuple) and output:
            return (self._as_ddp_output(method, output[0]), *output[1:])
        if isinstance(output, MultiLoss):
            first = next(iter(output.values()))
            return output.map(lambda loss: self._as_ddp_output(method, loss) if loss is first else loss)
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        # The added values are zeros, which change no bit of the loss.
        return in_place_of(output + self._tt_carrier.sum().to(output.dtype), output)

    def carry(self, numbers: Tensor) -> None:
        """Set the four numbers of a micro-batch, between its ``get_loss`` and its backward."""
        self.__dict__["_tt_numbers"] = numbers.to(self._tt_carrier)

    def averaged_numbers(self) -> Tensor | None:
        """Return the numbers' averages over the ranks, after a step's last backward. Each backward carries its own."""
        averages, self._tt_carrier.grad = self._tt_carrier.grad, None
        return averages


# Private names of torch that TTDistributedDataParallel uses; unchanged since torch 2.1. A missing name is an error:
# otherwise gradients would silently not be averaged, or be averaged in another order after a resume.
_REQUIRED = (
    (
        DistributedDataParallel,
        "_pre_forward _post_forward _inside_ddp_forward _check_reducer_finalized _ddp_init_helper _sync_buffers"
        " _remove_autograd_hooks to_kwargs",
    ),
    # A torch build without distributed has no Reducer; no wrapper can be created there.
    (getattr(dist, "Reducer", object), "_push_all_rebuilt_params _rebuild_buckets" if dist.is_available() else ""),
)
for _owner, _names in _REQUIRED:
    for _name in _names.split():
        if not callable(getattr(_owner, _name, None)):
            raise ImportError(
                f"torch {torch.__version__}: {_owner.__name__} no longer has {_name}, which trainloop needs. Install "
                "torch 2.6 to 2.15, or a newer trainloop."
            )


def cloned_gradient(gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient; ``None`` if the backward pass of one of several losses misses the parameter."""
    return None if gradient is None else gradient.clone()


def comm_hooks_of(wrapper: DistributedDataParallel) -> Sequence[tuple[Any, Any]]:
    """Return the communication hooks, with their states, that were registered with a wrapper.

    torch has no public way to read them (checked in torch 2.6 to 2.15). If it stores them elsewhere, the result is
    empty.
    """
    return getattr(wrapper, "_comm_hooks", ())


def _kinds_of(reduced: list[tuple[Tensor, bool]]) -> list[Any]:
    """Return what the reducer's hooks depend on: they are lost if a parameter's ``.data`` gets another one."""
    return [*(p.device for p, _ in reduced[:1]), *(p.dtype for p, _ in reduced)]


def hooked_node(parameter: Tensor) -> Any:
    """Return the node of autograd's graph on which DDP has its hook, or None if there is none to compare.

    Another dtype or device replaces this node, and it stays replaced if the parameter is changed back. DDP's own
    ``mixed_precision`` does so in each step, and sets its hooks again.
    """
    own = type(parameter) is nn.Parameter and not hasattr(parameter, "_mp_param")
    if not own or not parameter.requires_grad or torch.compiler.is_compiling():
        return None
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _explained(error: RuntimeError, wrapper: TTDistributedDataParallel) -> RuntimeError:
    """Add the parameters' names and advice to DDP's error about unused parameters; return any other error unchanged."""
    text = str(error)
    if "find_unused_parameters" not in text:
        return error
    known = {id(p): name for name, p in wrapper.module.named_parameters()}
    names = [known.get(id(p), "a removed parameter") for p, _ in wrapper._tt_reduced]  # in the reducer's order
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", text)
    # The message has only positions of parameters, in the list that DDP gave to the reducer.
    indices = [int(index) for index in found[1].split()] if found else []
    indices.sort(reverse=wrapper._tt_reversed)  # in DDP's order
    unused = ", ".join(names[i] for i in indices if i < len(names)) or "see below"
    return RuntimeError(
        f"On rank {dist.get_rank(wrapper.process_group)}, these parameters got no gradient in the last backward: "
        f"{unused}. Gradients could therefore not be averaged over ranks. If this is intended, pass "
        "find_unused_parameters=True to the wrapper (in a TrainLoop: fit(..., "
        "ddp_model_args={'find_unused_parameters': True})). Otherwise make the loss depend on these parameters, or "
        f"freeze them with requires_grad_(False) before wrapping.\n\nDistributedDataParallel's own message: {text}"
    )


def reduce_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Average gradients over ranks in place, as DDP does in the backward.

    Use it for steps under :meth:`TTDistributedDataParallel.no_exchange`. Collective: every rank of the group must call
    it, even if the rank ran no backward.

    Parameters
    ----------
    parameters : iterable of Tensor
        The same parameters on every rank, in the same order. Parameters that have no gradient on any rank are skipped.
    group : ProcessGroup, optional
        Ranks to average over. Default: all ranks.

    Notes
    -----
    ``.grad`` becomes the sum over ranks divided by the number of ranks; a missing gradient counts as zeros. If a
    parameter has no gradient on any rank, ``.grad`` stays ``None``. If the gradient is sparse on any rank, the result
    is sparse. One exchange, over the CPU if all ranks take part, sends a flag for each parameter. Then each dtype needs
    one exchange per 32 MiB of gradients. Sparse gradients need another exchange for their numbers of entries, and two
    more for each sparse gradient. In one process nothing happens.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    world_size = dist.get_world_size(group)
    trained = list(parameters)  # including frozen parameters: a get_loss may freeze parameters after using them
    if world_size == 1 or not trained:
        return
    # 0: no gradient, 1: dense, 2: sparse; the maximum over ranks counts.
    own = [0 if p.grad is None else 2 if p.grad.is_sparse else 1 for p in trained]
    # Over the CPU: flags on a GPU would be read only after the complete backward, while nothing else is queued.
    flags = torch.tensor(own, dtype=torch.int32, device="cpu" if group is None else trained[0].device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=cpu_group() if group is None else group)
    kinds = flags.tolist()
    _reduce_sparse([p for p, kind in zip(trained, kinds, strict=True) if kind == 2], world_size, group)
    dense = [p for p, kind in zip(trained, kinds, strict=True) if kind == 1]
    for bucket in buckets(dense, lambda p: p if p.grad is None else p.grad):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad.detach()).reshape(-1) for p in bucket])
        flat /= world_size  # divide before the sum, as DDP does, so that 16-bit sums stay in range
        dist.all_reduce(flat, group=group)
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p, memory_format=torch.preserve_format)
            with torch.no_grad():
                p.grad.copy_(mean.view(p.shape))  # in place: the gradient may be a view into a DDP bucket


def _reduce_sparse(parameters: list[Tensor], world_size: int, group: dist.ProcessGroup | None) -> None:
    if not parameters:
        return
    # Ranks differ in their number of entries, and NCCL has no sparse sum: gather the entries, padded to the longest.
    own = [None if p.grad is None else (p.grad if p.grad.is_sparse else p.grad.to_sparse(1)) for p in parameters]
    own = [None if grad is None else grad.detach().coalesce() for grad in own]
    counts = [[-1, 1] if grad is None else [grad._nnz(), grad.sparse_dim()] for grad in own]
    everyone = _gathered(torch.tensor(counts, device=parameters[0].device), world_size, group)
    counts_by_parameter = torch.stack(everyone).transpose(0, 1).tolist()
    for p, grad, counts in zip(parameters, own, counts_by_parameter, strict=True):
        present = [rank for rank, (count, _) in enumerate(counts) if count >= 0]
        longest, sparse_dim = max(count for count, _ in counts), max(counts)[1]
        indices = torch.zeros(sparse_dim, max(longest, 0), dtype=torch.int64, device=p.device)
        values = torch.zeros(max(longest, 0), *p.shape[sparse_dim:], dtype=p.dtype, device=p.device)
        if grad is not None:
            indices[:, : grad._nnz()] = grad.indices()
            values[: grad._nnz()] = grad.values()
        all_indices, all_values = _gathered(indices, world_size, group), _gathered(values, world_size, group)
        indices = torch.cat([all_indices[rank][:, : counts[rank][0]] for rank in present], dim=1)
        values = torch.cat([all_values[rank][: counts[rank][0]] for rank in present]) / world_size
        # Check indices that were received over a socket: each must be a row of the weights.
        summed = torch.sparse_coo_tensor(indices, values, p.shape, device=p.device, check_invariants=True)
        p.grad = summed.coalesce()


def _gathered(tensor: Tensor, world_size: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everyone, tensor.contiguous(), group=group)
    return everyone
