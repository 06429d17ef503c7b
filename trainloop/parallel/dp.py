"""Data parallelism in one process: DataParallel for models with a ``get_loss``, on GPUs or in threads on the CPU."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy as shallow_copy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.nn.parallel import DataParallel, replicate

from trainloop._support.blocks import surrounding_blocks
from trainloop._support.keywords import refuses_unknown
from trainloop._support.nested import map_parts
from trainloop._support.reduction import attach_divisor, divisor_of, sum_rule
from trainloop._support.user_line import warn
from trainloop.devices import whole_number
from trainloop.distributed.tensors import in_replica
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.optim.losses import split_yielded
from trainloop.optim.parameters import own_parameters
from trainloop.parallel.replicas.attributes import (
    ChangedMeanwhile,
    RegisteredParts,
    SetAttributes,
    WatchedTensors,
    explain_replica,
)
from trainloop.parallel.replicas.gather import as_rows, combine_losses, combine_predictions, gather, rows_of_ones
from trainloop.parallel.replicas.references import copies_of, refer_to_copies, warning_of_own_parts, with_copies
from trainloop.parallel.replicas.scatter import NotDivisibleError, batch_length, chunk_sizes, form_of, scatter
from trainloop.parallel.transparent import SharedName, Transparent, check_not_lazy, copy_attributes

_T = TypeVar("_T")


class TTDataParallel(Transparent, DataParallel):
    """An ``nn.DataParallel`` that runs a model's ``get_loss`` the way it runs ``forward``.

    ``wrapper.get_loss(...)``, ``get_loss_eval`` and ``get_predictions`` split the batch and run the method on a replica
    for each part. Then they join the results: the loss of the whole batch, or the predictions for all its rows, in
    order. Gradients add up in the module's own parameters. ``wrapper(...)`` runs ``forward`` in this way and
    concatenates the outputs, like ``nn.DataParallel``.

    If ``get_loss`` yields its losses, so that one optimizer steps after another within a batch, ``wrapper.get_loss``
    yields the losses of the whole batch, and the replicas get the module's new weights after each loss. If the
    criterion has ``reduction='sum'``, the losses of the parts are added (see ``trainloop._support.reduction``).

    You can read and write every other attribute, property and method of the model through the wrapper.

    Parameters
    ----------
    module : nn.Module
        Any module without lazy parameters. It need not define all three methods.
    device_ids : list of int or torch.device, optional
        GPUs to use. Default: all. The module must be on the first one. If there are no GPUs, the module is called
        directly.
    output_device : int or torch.device, optional
        Device of the results. Default: the first of ``device_ids``.
    dim : int
        Dimension of the samples in tensors.
    devices : int, optional
        Number of replicas to run on the CPU, each in a thread, even if there are GPUs. This is useful for testing.

    Raises
    ------
    ConfigurationError
        If ``devices`` is below 1, or is passed with ``device_ids`` or for a module on a GPU; or if the module has lazy
        parameters.
    Exception
        If a replica raises. The exception has the same type, and its message has the replica's number and traceback.

    Notes
    -----
    Batches are split as by ``torch.chunk``. With a batch of 7, 2 replicas get 4 and 3 samples; with 8 replicas, 7 get
    one sample each and one is idle.

    On its own, the wrapper takes the length of the first tensor for the number of samples, and passes what has another
    length to every replica. Like ``nn.DataParallel``, it cuts the tensors in a list, not the list. A ``TrainLoop``
    knows the number of samples, so a list with one item per sample (images of different sizes, targets) is cut, too. A
    batch that has other tensors (sparse or nested ones, too), an object that may contain samples, or a list that may
    contain samples or columns, stays whole: one replica computes its results, with a warning.

    As with ``nn.DataParallel``, a replica is a shallow copy. Attributes that the method sets on ``self``, and numbers
    in its dicts and lists, are kept if they have the same value in all replicas (such as a count of steps), and
    otherwise lost, with a warning for numbers. What replicas append to a list is kept, in the order of the parts.
    Lists and dicts of the model's layers, bound methods, closures and hooks refer to the replica's own layers.
    Replicas share other objects, such as a tensor that is an attribute; a warning names what they change in place.
    Only the first replica's in-place changes of buffers survive, so BatchNorm has the statistics of the first part. (In
    a ``TrainLoop``, other buffers that ``get_loss`` changes, such as a queue or a centre, are errors.) Exchanges such
    as ``all_gather`` are errors in a replica.

    On GPUs, as with ``nn.DataParallel``, a parameter that the loss doesn't use gets a gradient of zeros. (In mode
    ``single`` it gets none.) Therefore an optimizer with weight decay changes this parameter.

    CPU replicas run one after another, because all threads share torch's CPU random generator: if they ran at the same
    time, dropout would draw different numbers in each run. A replica's operations use all cores.

    The name ``module`` refers to the wrapped model. If the model has an attribute ``module``, use
    ``wrapper.module.module``.

    Examples
    --------
    >>> wrapper = TTDataParallel(nn.Linear(2, 1), devices=2)
    >>> wrapper(torch.zeros(7, 2)).shape
    torch.Size([7, 1])
    """

    # Methods of DataParallel.forward that this class replaces; a model may define methods with these names.
    scatter = SharedName("scatter", DataParallel.scatter)
    replicate = SharedName("replicate", DataParallel.replicate)
    parallel_apply = SharedName("parallel_apply", DataParallel.parallel_apply)
    gather = SharedName("gather", DataParallel.gather)

    @refuses_unknown
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        devices: int | None = None,
    ) -> None:
        check_not_lazy(module, "TTDataParallel")
        if whole_number(dim) is None:
            raise ConfigurationError(f"dim={dim!r}: the dimension of the batch must be an int.")
        if devices is None:
            super().__init__(module, device_ids, output_device, dim)
            self._tt_devices = [torch.device(self.src_device_obj.type, i) for i in self.device_ids]
            if self._tt_devices:
                self._tt_output_device = torch.device(self.src_device_obj.type, self.output_device)
        else:
            _check_cpu_replicas(module, devices, device_ids, output_device)
            nn.Module.__init__(self)
            self.module = module
            self.device_ids = []
            self._tt_devices = [torch.device("cpu")] * int(devices)
        if len(self._tt_devices) > 1:
            _check_not_compiled(module)
        self.dim = dim  # DataParallel does not set it without a GPU
        self._become_transparent()

    _tt_watches = False
    _tt_compared = 0  # number of the next calls of get_loss whose changes of values are found, too
    _tt_samples: int | None = None
    _tt_others: dict[Any, set[int]]  # by a batch's form: tensors without a row per sample, in the order of the batch
    _tt_has_run = False
    _tt_warned = False
    _tt_warned_of_attributes = False
    _tt_devices: list[torch.device]  # devices of the replicas; empty: call the module itself
    _tt_output_device: torch.device

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, concatenated along ``dim``."""
        run = self._run_method
        if torch.compiler.is_compiling():  # torch.compile(wrapper): replicas are made and run as they are
            run = torch.compiler.disable(run)
        return run("__call__", *inputs, **kwargs)

    def _run_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        devices = self._tt_devices
        if not devices:
            return _bound(self.module, method)(*args, **kwargs)
        if len(devices) == 1:
            return self._run_on_one_device(method, args, kwargs)
        # Parameters may have been moved since construction; an error from the first kernel would not name a tensor.
        self._check_on(devices[0])
        with torch.autograd.profiler.record_function(f"DataParallel.{method}"):
            # A dict, since a tuple of arguments without tensors would be a list of samples.
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            chunks, sizes = self._chunks(given, len(devices))
            cut = [([part[i] for i in range(len(args))], {name: part[name] for name in kwargs}) for part in chunks]
            devices = devices[: len(cut)]
            inputs = _on_devices(cut, devices)
            # There are too few samples to split, so no replica is created.
            if len(cut) == 1:
                return _bound(self.module, method)(*inputs[0][0], **inputs[0][1])
            replicas = _replicas(self.module, devices, sizes)
            inputs, criteria = _with_criteria(inputs, devices, sizes, [(self.module, one) for one in replicas])
            replicated = [(self.module, replicas), *criteria]
            calls = [
                partial(_bound(replica, method), *own_args, **own_kwargs)
                for replica, (own_args, own_kwargs) in zip(replicas, inputs, strict=True)
            ]
            watches = self._tt_watches and method == "get_loss" and torch.is_grad_enabled()
            watch = partial(_Watched, replicated, watches, watches and self._tt_compared > 0)
            if watches:
                self.__dict__["_tt_compared"] = self._tt_compared - 1
            watched = watch()
            outputs = self._outputs(calls, devices)
            self._keep_attributes(watched, method)
            if method == "__call__":
                return gather(outputs, self.dim, sizes)
            if method == "get_predictions":
                found = [as_rows(output) for output in outputs]
                if all(isinstance(output, tuple) for output in found):  # (y_pred, y_true, metadata) are no rows
                    if set(sizes) == {1}:
                        found = rows_of_ones(found)
                    return tuple(combine_predictions(part, sizes, self.dim) for part in zip(*found, strict=True))
                return combine_predictions(found, sizes, self.dim)
            criterion = kwargs.get("criterion", args[1] if len(args) > 1 else None)
            if isinstance(outputs[0], Generator):
                return self._yield_losses(outputs, replicated, devices, sizes, criterion, watch)
            return self._loss_of_all(outputs, sizes, criterion, 0)

    def _run_on_one_device(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of the module itself, on the only device."""
        self.__dict__["_tt_samples"] = None
        args, kwargs = _on_devices([(args, kwargs)], self._tt_devices)[0]
        try:
            return _bound(self.module, method)(*args, **kwargs)
        except RuntimeError:
            self._check_on(self._tt_devices[0])  # an error from a kernel does not name the tensor
            raise

    def _chunks(self, given: dict[Any, Any], number: int) -> tuple[list[dict[Any, Any]], list[int]]:
        """Return the arguments of each replica, and its number of samples."""
        samples, self.__dict__["_tt_samples"] = self._tt_samples, None
        if samples is None:
            chunks = scatter(given, number, self.dim)
            return chunks, chunk_sizes(batch_length(given, self.dim) or 0, number)
        key = "batch_data" if "batch_data" in given else 0
        batch = given[key]
        others = self.__dict__.setdefault("_tt_others", {}).setdefault(form_of(batch), set())
        try:
            chunks = [{**given, key: part} for part in scatter(batch, number, self.dim, samples, others)]
        except NotDivisibleError as error:
            chunks = [given]
            if not self._tt_warned:
                self.__dict__["_tt_warned"] = True
                warn(
                    f"gpu_mode='dp': a batch of {samples} samples was not divided among the replicas, because {error}. "
                    "Its results are right, but one replica computes them, and those of later batches with these "
                    "parts. To divide them, let collate_fn return tensors with one row per sample, and columns in a "
                    "dict, or use gpu_mode='ddp'."
                )
        return chunks, chunk_sizes(samples, number) if len(chunks) > 1 else [samples]

    def _outputs(self, calls: Sequence[Callable[[], Any]], devices: list[torch.device]) -> list[Any]:
        """Return each replica's result, on the output device."""
        try:
            with contextlib.nullcontext() if self._tt_has_run else warning_of_own_parts(self.module):
                self.__dict__["_tt_has_run"] = True
                outputs = _in_threads(calls, devices)
        except RuntimeError as error:
            explain_replica(error)
            raise
        if devices[0].type != "cpu":
            with torch.enable_grad():  # in an evaluation, a loss may have a graph
                outputs = [_on_device(output, self._tt_output_device) for output in outputs]
        return outputs

    def _loss_of_all(self, losses: list[Any], sizes: list[int], criterion: Any, position: int) -> Any:
        """Return the loss of the whole batch from the losses of its parts; ``position``: among the yielded losses."""
        if self._tt_devices[0].type == "cpu":
            return _in_new_thread(lambda: self._combined(losses, sizes, criterion, position), self._tt_devices[0])
        return self._combined(losses, sizes, criterion, position)

    def _combined(self, losses: list[Any], sizes: list[int], criterion: Any, position: int) -> Any:
        rule = sum_rule(self.module, criterion)
        if rule is None or isinstance(losses[0], tuple):
            return combine_losses(losses, sizes)
        # Without a graph, use the last decision for this position: in evaluation's first batch, losses have a graph.
        decided: dict[int, bool | frozenset[str]] = self.__dict__.setdefault("_tt_summed", {})
        first = losses[0].values() if isinstance(losses[0], Mapping) else losses[:1]
        if rule.certain or any(getattr(loss, "requires_grad", False) for loss in first):
            decided[position] = rule(losses[0])
        with torch.enable_grad():
            return combine_losses(losses, sizes, decided.get(position, True))

    def _yield_losses(
        self,
        generators: list[Generator[Any, None, None]],
        replicated: list[tuple[Any, list[Any]]],
        devices: list[torch.device],
        sizes: list[int],
        criterion: Any,
        watch: Callable[[], _Watched],
    ) -> Iterator[Any]:
        """Yield the whole batch's losses, one by one; after each, renew what hooks and the optimizer have changed."""
        ended = object()
        for position in itertools.count():
            watched = watch()
            items = self._outputs([partial(next, generator, ended) for generator in generators], devices)
            self._keep_attributes(watched, "get_loss")
            if all(item is ended for item in items):
                return
            split = [split_yielded(item) for item in items]
            names = {name for name, _ in split}
            if len(names) > 1 or ended in items:
                raise ConfigurationError(
                    "for the parts of one batch (one for each replica), get_loss yielded losses for different "
                    "optimizers at the same position, or different numbers of losses. Make the sequence of losses "
                    "depend only on values that are the same for all parts."
                )
            (name,) = names
            loss = self._loss_of_all([loss for _, loss in split], sizes, criterion, position)
            waiting = [(module, replicas, ChangedMeanwhile(module)) for module, replicas in replicated]
            yield loss if name is None else (name, loss)
            for module, replicas, changed in waiting:
                is_module = isinstance(module, nn.Module)
                newer = _replicas(module, devices, sizes) if is_module else [module] * len(replicas)
                for pair in zip(replicas, newer, strict=True):
                    if is_module:
                        _renew(*pair, set())
                    changed.put(*pair)

    def _keep_attributes(self, watched: _Watched, method: str) -> None:
        """Keep the attributes that a method has set in all replicas alike; warn once of others."""
        lost, shared = watched.check_and_keep()
        if (lost or shared) and not self._tt_warned_of_attributes:
            self.__dict__["_tt_warned_of_attributes"] = True
            changes, effect = f"{method} changes {', '.join((lost or shared)[:5])}", "so the change is lost"
            if not lost:
                changes += " in place"
                effect = "so it is changed once for each part: a sum over samples is right, but not a count of steps"
            warn(
                f"gpu_mode='dp': {changes}, but each replica has only a part of the batch, {effect}. Use "
                "gpu_mode='ddp' or 'single', or make the change in a callback."
            )

    def _check_on(self, device: torch.device) -> None:
        for t in (*own_parameters(self.module), *self.module.buffers()):
            if t.device != device:
                raise RuntimeError(
                    f"TTDataParallel: the module must be on {device}, its first device, but has a tensor on "
                    f"{t.device}. Call module.to('{device}') first."
                )


def _check_not_compiled(module: nn.Module) -> None:
    """Raise an error for a module that ``torch.compile`` returned: its copy would call itself without end."""
    for name, part in module.named_modules():
        if "_orig_mod" in part._modules:
            raise ConfigurationError(
                f"TTDataParallel: {name or 'the module'} is the result of torch.compile(...), of which torch makes no "
                f"replicas. Compile it in place, {'model' if not name else f'model.{name}'}.compile(), or use "
                "gpu_mode='ddp'."
            )


class _Watched:
    """What a call changes in a model and in criteria: tensors and attributes, compared between their replicas."""

    def __init__(self, replicated: list[tuple[Any, list[Any]]], tensors: bool, values: bool) -> None:
        modules = [(module, copies) for module, copies in replicated if tensors and isinstance(module, nn.Module)]
        self._tensors = [WatchedTensors(module, copies, values) for module, copies in modules]
        self._attributes = [SetAttributes(module, copies) for module, copies in replicated]
        own = [(module, copies) for module, copies in replicated if isinstance(module, nn.Module)]
        self._registered = [RegisteredParts(module, copies) for module, copies in own]

    def check_and_keep(self) -> tuple[list[str], list[str]]:
        """Raise an error for tensors that differ, and keep attributes that are alike.

        Return the names of attributes that are lost, and of those that replicas share and have changed in place.
        """
        lost = [name for registered in self._registered for name in registered.keep()]
        for tensors in self._tensors:
            tensors.check()
        shared = [name for attributes in self._attributes for name in attributes.shared_changes()]
        return lost + [name for attributes in self._attributes for name in attributes.keep()], shared


def _check_cpu_replicas(module: nn.Module, devices: Any, device_ids: Any, output_device: Any) -> None:
    if (number := whole_number(devices)) is None or number < 1:
        raise ConfigurationError(f"devices={devices!r}: the number of replicas on the CPU must be an int of 1 or more.")
    if device_ids is not None or output_device is not None:
        raise ConfigurationError(
            f"devices={devices} asks for replicas on the CPU, but device_ids={device_ids!r} and "
            f"output_device={output_device!r} ask for GPUs. Pass devices, or the other two."
        )
    on = {str(p.device) for p in own_parameters(module) if p.device.type != "cpu"}
    if on:
        raise ConfigurationError(
            f"devices={devices} asks for replicas on the CPU, but the module is on {', '.join(sorted(on))}. Call "
            "module.cpu() first, or pass device_ids for GPUs."
        )


def _bound(module: nn.Module, method: str) -> Callable[..., Any]:
    return module if method == "__call__" else getattr(module, method)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        divisor = divisor_of(value)
        if isinstance(divisor, Tensor):
            divisor = divisor.to(device, non_blocking=True)
        return attach_divisor(value.to(device, non_blocking=True), divisor)
    if isinstance(value, MultiLoss):
        return value.map(lambda loss: _on_device(loss, device))
    return map_parts(lambda item: _on_device(item, device), value)


def _on_devices(cut: list[Any], devices: list[torch.device]) -> list[Any]:
    """Move part i to device i: its tensors, and the ``device`` argument."""
    if devices[0].type == "cpu":
        return cut

    def moved(item: Any, i: int) -> Any:
        if isinstance(item, torch.device):
            return devices[i]
        if isinstance(item, Tensor):
            return item.to(devices[i], non_blocking=True)
        return map_parts(lambda part: moved(part, i), item)

    return [moved(part, i) for i, part in enumerate(cut)]


def _may_have_state(item: Any) -> bool:
    """Return True for a module, or an object that is called like one, such as a loss that counts its calls."""
    if hasattr(item, "_orig_mod"):  # a compiled module can't be copied
        return False
    return callable(item) and hasattr(item, "__dict__") and not isinstance(item, (type, FunctionType))


def _copies(item: Any, number: int) -> list[Any]:
    try:
        return [shallow_copy(item) for _ in range(number)]
    except Exception:  # a class may forbid copies
        return [item] * number


def _with_criteria(
    cut: list[Any], devices: list[torch.device], sizes: list[int], models: list[tuple[nn.Module, nn.Module]]
) -> tuple[list[Any], list[tuple[Any, list[Any]]]]:
    """Give each part replicas of the criteria, which may have state; return the criteria with their replicas, too.

    A criterion that is a method of the model, or a function that calls the model, becomes one of the part's replica.
    """
    copies: dict[int, tuple[Any, list[Any]]] = {}

    def replaced(item: Any, i: int) -> Any:
        if isinstance(item, (FunctionType, MethodType, partial)):
            own = with_copies(item, copies_of(*models[i]), {})
            if own is not item:
                return own
        if _may_have_state(item):
            if id(item) not in copies:
                is_module = isinstance(item, nn.Module)
                copies[id(item)] = item, _replicas(item, devices, sizes) if is_module else _copies(item, len(cut))
            return copies[id(item)][1][i]
        return map_parts(lambda part: replaced(part, i), item)

    parts_with = [
        (
            args[:1] + [replaced(item, i) for item in args[1:]],
            {name: item if name == "batch_data" else replaced(item, i) for name, item in kwargs.items()},
        )
        for i, (args, kwargs) in enumerate(cut)
    ]
    return parts_with, list(copies.values())


def _replicas(module: nn.Module, devices: list[torch.device], sizes: list[int]) -> list[nn.Module]:
    """Return one replica per device, for that device's samples; gradients go to the module's own parameters."""
    if devices[0].type == "cpu":
        replicas = _in_new_thread(
            lambda: [_cpu_replica(module, shares_buffers=i == 0) for i in range(len(devices))], devices[0]
        )
    else:
        with torch.enable_grad():
            replicas = replicate(module, devices)
    for replica, size in zip(replicas, sizes, strict=True):
        scripted = False
        for part in replica.modules():
            part.__dict__["_log_batch_size"] = size  # weight of the values in TTModel.log
            # torch leaves parameters() of a replica empty, so a penalty on the weights in get_loss would be lost.
            if isinstance(part, torch.jit.ScriptModule):
                scripted = True
            else:
                _register(part)
            # This attribute would run the compiled module instead of the replica.
            part.__dict__.pop("_compiled_call_impl", None)
        if not scripted:
            copy_attributes(module, replica)
        refer_to_copies(module, replica)
    return replicas


def expect_samples(wrapper: TTDataParallel, samples: int) -> None:
    """Set the number of samples in the batch of the next call; by default, it is the first tensor's length."""
    wrapper.__dict__["_tt_samples"] = samples


def refuse_changes_in_get_loss(wrapper: TTDataParallel, compared: int) -> None:
    """Let a wrapper raise an error if ``get_loss`` changes parameters or buffers (except BatchNorm's).

    In the next ``compared`` calls, changes through ``.data`` are found, too, which takes time.
    """
    wrapper.__dict__.update(_tt_watches=True, _tt_compared=compared)


def _register(part: nn.Module) -> None:
    """Make a replica's tensors its parameters, not attributes: torch.func.functional_call replaces only parameters.

    Libraries such as torchdiffeq look for a replica's parameters in its attributes, so it no longer claims to be one.
    """
    part.__dict__["_is_replica"] = False
    for name, tensor in part.__dict__.get("_former_parameters", {}).items():
        part.__dict__.pop(name, None)
        part._parameters[name] = tensor


def _renew(part: nn.Module, newer: nn.Module, done: set[nn.Module]) -> None:
    """Give a replica that is in the middle of a method the tensors and the new modules of a newer one."""
    done.add(part)
    part._parameters.clear()  # otherwise, a tensor can't replace a parameter
    for name, tensor in newer.__dict__["_former_parameters"].items():
        setattr(part, name, tensor)  # setattr, since an RNN's __setattr__ updates its list of weights
    part.__dict__["_former_parameters"] = newer.__dict__["_former_parameters"]
    _register(part)
    part._buffers.clear()
    part._buffers.update(newer._buffers)
    before = dict(part._modules)
    part._modules.clear()
    for name, child in newer._modules.items():
        own = before.get(name)
        if own is None or child is None or type(own) is not type(child):
            part._modules[name] = child
        else:
            part._modules[name] = own
            if own not in done:  # modules may refer to each other
                _renew(own, child, done)


def _cpu_replica(module: nn.Module, shares_buffers: bool) -> nn.Module:
    """Return a replica on the CPU. The code follows torch.nn.parallel.replicate, which rejects the CPU."""
    copies = {part: part._replicate_for_data_parallel() for part in module.modules()}
    views: dict[Tensor, Tensor] = {}  # tied parameters stay tied
    for part, copy in copies.items():
        copy._former_parameters = {}
        for name, child in part._modules.items():
            if child is not None:
                setattr(copy, name, copies[child])
        for name, parameter in part._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:
                # The backward of alias accepts sparse gradients; the backward of view_as does not.
                with torch.enable_grad():  # an evaluation may enable gradients itself, such as for an inner loop
                    view = views.setdefault(parameter, torch.ops.aten.alias(parameter))
                setattr(copy, name, view)  # setattr, since an RNN's __setattr__ updates its list of weights
                copy._former_parameters[name] = view
        for name, buffer in part._buffers.items():
            if buffer is not None:
                own = buffer if shares_buffers else views.setdefault(buffer, buffer.detach().clone())
                copy._buffers[name] = own  # a name may contain dots, as in tensordict, which setattr refuses
    return copies[module]


def _in_threads(calls: Sequence[Callable[[], Any]], devices: list[torch.device]) -> list[Any]:
    """Run each call in a separate thread, and return the results.

    If calls raise exceptions, raise the first one here.
    """
    results: list[Any] = [None] * len(calls)
    ends: list[BaseException] = []
    settings = _thread_settings(devices)

    def work(i: int) -> None:
        try:
            with settings(devices[i]), in_replica():
                results[i] = calls[i]()
        except Exception:
            results[i] = ExceptionWrapper(where=f"in replica {i} on {devices[i]}")
        except BaseException as error:  # SystemExit: with its code
            ends.append(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, i), name=f"TTDataParallel replica {i}")
        for i in range(len(calls))
    ]
    for thread in threads:
        thread.start()
        if devices[0].type == "cpu":
            thread.join()  # one after the other: see the class's notes
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, ExceptionWrapper):
            result.reraise()
    if ends:
        raise ends[0]
    return results


def _in_new_thread(function: Callable[[], _T], device: torch.device) -> _T:
    """Call a function on the CPU as replicas are called, in a thread of its own.

    Autograd adds up gradients in the order of numbers that each thread counts from 0. With numbers of the calling
    thread, the gradients' bits would depend on what the process has done before, and a resumed run would differ.
    """
    settings = _thread_settings([device])

    def work() -> _T:
        with settings(device):
            return function()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, work).result()


def _thread_settings(
    devices: list[torch.device],
) -> Callable[[torch.device], contextlib.AbstractContextManager[None]]:
    """Return a function ``device -> context``; the context applies this thread's torch settings in another thread.

    ``nn.parallel.parallel_apply`` enables autocast in its threads, but not with this thread's dtype: bf16 becomes fp16.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")}
    autocasts = [kind for kind in dtypes if torch.is_autocast_enabled(kind)]
    # Only for GPUs: replicas on the CPU must not initialize CUDA, which may be impossible in this process.
    streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}
    blocks = surrounding_blocks()

    @contextlib.contextmanager
    def settings(device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(streams[device]))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad and not inference))
            for block in blocks:  # among them is the mode of functional_losses
                stack.enter_context(block.again())
            torch.set_autocast_cache_enabled(cache)
            for kind, dtype in dtypes.items():  # also for a torch.autocast of the model that names no dtype
                torch.set_autocast_dtype(kind, dtype)
            for kind in autocasts:
                stack.enter_context(torch.autocast(kind, dtypes[kind], cache_enabled=cache))
            yield

    return settings
