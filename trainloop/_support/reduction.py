"""Determine if a loss is a mean over samples (the usual case), a mean over the weights of targets, or a sum.

If a loss is a sum, gradients must be added over ranks, replicas and micro-batches: their average would be too small. So
sums are detected, as far as the model or the criterion declares them.

``nn.CrossEntropyLoss`` and ``nn.NLLLoss`` divide by the sum of the class weights of all targets that are not ignored.
This *divisor* is the weight of such a loss, as if ``get_loss`` had returned ``(loss, divisor)``. It is known only if
``get_loss`` returns the tensor that the criterion created, or its product with a number, because autograd's node of the
criterion contains it. Where there is no graph to read, in an evaluation and in compiled code, the divisor is attached
to the tensor: by a hook on the criterion, or by a mode that sees torch's functions.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.torch_version import TorchVersion

from trainloop._support.nested import entries_of, leaves_of, map_parts, own_attributes

_MOST_PARTS = 1000  # of a criterion that is an object of the user's


@dataclass(frozen=True)
class SumRule:
    """Decides for each loss if it is a sum over samples; created by :func:`sum_rule`."""

    certain: bool
    """True if the model declares sums. False if only the criterion does: ``get_loss`` may have divided its sum."""
    known: bool | frozenset[str] | None = None
    """What an earlier loss was, which has decided for all; ``None`` if each loss is looked at."""

    def __call__(self, loss: Tensor | Mapping[str, Tensor]) -> bool | frozenset[str]:
        """Return True if this loss is a sum; the names of those that are, if only some losses of several are.

        If only the criterion declares it, check the loss's graph, if any.
        """
        if self.known is not None:
            return self.known
        if isinstance(loss, Tensor):
            return self.certain or not _is_mean(loss)
        summed = frozenset(
            name
            for name, part in loss.items()
            if divisor_of(part) is None and (self.certain or not _is_mean(part))  # with a weight, it is a mean
        )
        return summed if len(summed) < len(loss) else True


def sum_rule(model: Any, criterion: Any) -> SumRule | None:
    """Return the rule that distinguishes sums over samples from means; ``None`` if all losses are means.

    Parameters
    ----------
    model : object
        Its ``loss_reduction``, 'sum' or 'mean', decides.
    criterion : object
        Without ``loss_reduction``, the criterion's ``reduction`` decides. If the criterion has none, the ``reduction``
        of everything inside it decides: modules, :func:`~trainloop._support.nested.entries_of` containers and
        functions, attributes of objects, keywords of ``functools.partial``.

    Examples
    --------
    >>> sum_rule(None, nn.MSELoss(reduction="sum"))
    SumRule(certain=False, known=None)
    >>> sum_rule(None, {"pixels": nn.L1Loss(reduction="sum"), "class": nn.CrossEntropyLoss()}) is None
    True
    """
    declared = getattr(model, "loss_reduction", None)
    if declared is not None:
        return SumRule(certain=True) if declared == "sum" else None
    of_criterion = {reduction for _, reduction in declared_reductions(criterion)}
    return SumRule(certain=False) if of_criterion == {"sum"} else None


def declared_reductions(criterion: Any) -> Iterator[tuple[Any, str]]:
    """Yield each object in a criterion that declares a ``reduction``, and its value; None for a partial's keyword."""
    if isinstance(whole := _reduction_of(criterion), str):  # the usual case first
        yield criterion, whole
        return
    seen, left = set[int](), [criterion]
    while left and len(seen) < _MOST_PARTS:
        part = left.pop(0)
        if id(part) in seen or isinstance(part, (type, ModuleType, Tensor)):
            continue
        seen.add(id(part))
        own = _reduction_of(part)
        keyword = part.keywords.get("reduction") if isinstance(part, functools.partial) else None
        if isinstance(own, str):
            yield part, own
        elif isinstance(keyword, str):
            yield None, keyword
        elif isinstance(part, nn.Module):
            left += part.children()
        else:
            left += entries_of(part).values() or _attributes_of(part)


def _reduction_of(part: Any) -> Any:
    try:
        return getattr(part, "reduction", None)
    except Exception:  # whatever a user's __getattr__ raises
        return None


def _attributes_of(part: Any) -> list[Any]:
    """Return the attributes of an object that is no function; a model among them has a reduction of its own."""
    values = {} if hasattr(part, "__code__") else own_attributes(part)
    return [value for value in values.values() if not hasattr(value, "get_predictions")]


class DeclaredReductions:
    """The reductions that a criterion declares, to notice changes in place: of the values, or of a dict's entries."""

    def __init__(self, criterion: Any) -> None:
        self._criterion, self._entries = criterion, _all_entries(criterion)
        declared: list[tuple[Any, Any]] = [
            (one, value) for one, value in declared_reductions(criterion) if one is not None
        ]
        self._declared = declared or [(criterion, getattr(criterion, "reduction", None))]

    def changed(self) -> bool:
        """Return True if another rule may hold now. Called before each batch."""
        for one, value in self._declared:
            if getattr(one, "reduction", None) != value:
                return True
        if not self._entries:
            return False
        now = _all_entries(self._criterion)
        return len(now) != len(self._entries) or not all(map(operator.is_, now, self._entries))


def _all_entries(criterion: Any) -> list[Any]:
    """Return the entries of a dict or a list of criteria, and of those in it; empty for any other object, for speed."""
    if not isinstance(criterion, (Mapping, list, tuple)):
        return []
    entries = criterion.values() if isinstance(criterion, Mapping) else criterion
    return [part for entry in entries for part in _all_entries(entry) or [entry]]


@contextmanager
def graph_of_losses(model: nn.Module | None, criterion: Any) -> Iterator[None]:
    """Give losses a graph in an evaluation, which :class:`SumRule` reads.

    If the model has modules that would compute other values with a graph, the graph begins at the criterion's result.
    """
    declared = [one for one, _ in declared_reductions(criterion)]
    begins_late = _has_fast_modules(model) and all(isinstance(one, nn.Module) for one in declared)
    with torch.set_grad_enabled(not begins_late), ExitStack() as undo:
        for one in declared if begins_late else ():
            undo.callback(one.register_forward_hook(_begin_graph).remove)
        yield


def _begin_graph(criterion: nn.Module, args: Any, loss: Any) -> Any:
    torch.set_grad_enabled(True)
    if isinstance(loss, Tensor):
        return loss.detach().requires_grad_()
    return map_parts(functools.partial(_begin_graph, criterion, args), loss)


def _is_divided(loss: Tensor) -> bool:
    """Return True if a scalar was divided by a plain number to get this loss: ``criterion(...) / len(x)`` is a mean.

    Division by a learned value (weighting by uncertainty) does not count.
    """
    return any(
        node.name().startswith("DivBackward")
        and _is_of_scalar(node)
        and node.next_functions[1][0] is None  # the operands: dividend and divisor
        for node in graph_nodes([loss], _is_of_scalar)
    )


def _is_mean(loss: Tensor) -> bool:
    """Return True if a sum was divided to get this loss, or if it adds only means of torch."""
    if _is_divided(loss):
        return True
    found = {
        node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
        for node in graph_nodes([loss], _is_linear)
        if not _is_linear(node)
    }
    return found == {True}


def _is_linear(node: Any) -> bool:
    """Return True for the nodes of sums, of products with a number, and of the mean of a single number."""
    if node.name().startswith(("AddBackward", "SubBackward", "NegBackward")):
        return True
    if node.name().startswith("MeanBackward"):
        return _is_of_scalar(node.next_functions[0][0])
    return node.name().startswith("MulBackward") and any(before is None for before, _ in node.next_functions)


def graph_nodes(tensors: Iterable[Tensor], enters: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Yield each node of the autograd graphs of tensors once; those before a node only if ``enters(node)`` is true."""
    nodes: list[Any] = [*map(_graph_of, tensors)]
    seen = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if enters(node):
                nodes += [before for before, _ in node.next_functions]


def adds_samples(loss: Tensor) -> bool:
    """Return True if a loss adds results of torch's losses with ``reduction="sum"``, and no means.

    Examples
    --------
    >>> x = torch.ones(3, requires_grad=True)
    >>> total = functional.mse_loss(x, torch.zeros(3), reduction="sum")
    >>> adds_samples(total + x.sum()), adds_samples(total / 3), adds_samples(total + functional.mse_loss(x, x))
    (True, False, False)
    """
    found = {
        _MEAN if node.name().startswith("MeanBackward") else getattr(node, "_saved_reduction", None)
        for node in graph_nodes([loss], _keeps_a_sum)
        if not _keeps_a_sum(node)
    }
    return _SUM in found and _MEAN not in found


def _keeps_a_sum(node: Any) -> bool:
    """Return True for sums, and for products with a number; a small one, as ``1 / len(x)``, makes a mean of a sum."""
    if node.name().startswith(("AddBackward", "SubBackward", "NegBackward")):
        return True
    other: Any = getattr(node, "_saved_other", None) if node.name().startswith("MulBackward") else None
    if type(other) not in (Tensor, nn.Parameter) or not other.is_cpu or other.numel() != 1:
        return False
    number: Any = other.tolist()  # without a dispatch: to modes, torch gives such a tensor as a number of Python
    while isinstance(number, list):  # (1,) is a usual shape of learned weights
        (number,) = number
    return bool(abs(number) >= 0.5)


def _is_of_scalar(node: Any) -> bool:
    """Return True if an autograd node computed a single number. Earlier nodes are those of the model.

    ``_input_metadata`` exists in torch 2.1 to 2.13. Without it, no division is detected, and the criterion's
    declaration is used.
    """
    metadata: Any = getattr(node, "_input_metadata", ())
    return bool(metadata) and all(size == 1 for size in metadata[0].shape)


# -- losses of class indices -------------------------------------------------------------------------------------------

_NODES = ("NllLossBackward0", "NllLoss2DBackward0")
_FACTORS = ("MulBackward0", "DivBackward0", "NegBackward0")
_MEAN, _SUM = 1, 2  # torch's numbers for reduction='mean' and 'sum'


def divisor_of(loss: Tensor, *, new: bool = False) -> Tensor | float | None:
    """Return the sum of the weights of the targets that a loss was divided by; ``None`` for any other loss.

    With ``new``, for a loss that was just computed, it is also ``None`` if the graph contains it behind hooks.

    The result is a number on the CPU, and a 0-d tensor on other devices, since reading it would wait for the device.
    """
    attached: Any = loss.__dict__.get("trainloop_divisor")
    if attached is not None:
        return attached
    node: Any = loss.grad_fn
    while node is not None and type(node).__name__ in _FACTORS:
        # A factor without a graph does not change what the loss is a mean over; any other operand makes a new loss.
        operands = [before for before, _ in node.next_functions]
        node = operands[0] or operands[-1] if None in operands or len(operands) == 1 else None
    if node is not None and type(node).__name__ == "AddBackward0":
        node = _smoothed(node)
    if node is None or type(node).__name__ not in _NODES or node._saved_reduction != _MEAN:
        return None
    if new and _has_hooks(node._raw_saved_total_weight):
        return None
    try:
        total: Tensor = node._saved_total_weight
        if total.element_size() <= 2:  # in 16 bits a count above 256 or 2048 is rounded
            return _divisor(node._saved_target, node._saved_weight, node._saved_ignore_index)
    except RuntimeError:  # the graph was freed: backward will raise
        return None
    return total.item() if total.is_cpu else total


def _has_hooks(saved: Any) -> bool:
    """Return True if hooks unpack a tensor that autograd has saved; those of a checkpoint run its forward again.

    Torch allows one pair of hooks for each tensor, so a second call for the same tensor returns True.
    """
    try:
        saved.register_hooks(_unchanged, _unchanged)
    except RuntimeError:
        return True
    return False


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _smoothed(node: Any) -> Any:
    """Return the node of the class loss in a sum that ``label_smoothing`` makes; ``None`` for any other sum.

    Both summands are products with a number (MulBackward1), which only torch's own C++ code makes: a product in Python
    is one of two tensors (MulBackward0).
    """
    summands = [before for before, _ in node.next_functions]
    if any(type(summand).__name__ != "MulBackward1" for summand in summands):
        return None
    return summands[0].next_functions[0][0]


def _has_no_negative(target: Tensor) -> bool:
    return target.is_cpu and target.numel() > 0 and not torch.compiler.is_compiling() and int(target.min()) >= 0


def _number(total: Tensor) -> Tensor | float:
    return total.item() if total.is_cpu and not torch.compiler.is_compiling() else total


def attach_divisor(loss: Tensor, divisor: Tensor | float | None) -> Tensor:
    """Attach a divisor to a loss, for :func:`divisor_of`; ``None`` attaches nothing."""
    if divisor is not None:
        loss.trainloop_divisor = divisor  # type: ignore[attr-defined]
    return loss


def _graph_of(tensor: Tensor) -> Any:
    """Return the last node of a tensor's graph; of a tensor that wrappers have made of a loss, that of the loss."""
    return getattr(tensor, "trainloop_graph", tensor.grad_fn)


def in_place_of(loss: Tensor, output: Tensor) -> Tensor:
    """Let a tensor that a wrapper has made of a loss be read like the loss itself: by its graph and its divisor.

    A subclass of ``Tensor``, such as MONAI's ``MetaTensor``, may copy its attributes to each result, which fails for a
    graph. So its tensor becomes a plain one.
    """
    if type(loss) is not Tensor:
        loss = loss.as_subclass(Tensor)
    loss.trainloop_graph = _graph_of(output)  # type: ignore[attr-defined]
    return attach_divisor(loss, divisor_of(output))


def _divisor(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor | float:
    if ignore_index >= 2**63:  # autograd returns a negative index as an unsigned number
        ignore_index -= 2**64
    if weight is None and ignore_index < 0 and _has_no_negative(target):
        return target.numel()  # the usual case, at half the cost
    counted = target != ignore_index
    if weight is None:
        return _number(counted.sum())
    # An ignored target is often not a class: -100 is not an index of the weights.
    return _number((weight.detach()[target * counted] * counted).sum(dtype=torch.float64 if weight.is_cpu else None))


def _attach(loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor | float | None:
    """Attach the divisor to a criterion's loss, unless the loss's graph contains it; return the divisor.

    Inside ``torch.func.vmap`` no number can be read. A loss of one sample is not what ``get_loss`` returns, so nothing
    is attached there, and the result is ``None``.
    """
    try:
        # While torch.compile traces, a tensor has no __dict__ to read.
        divisor = None if torch.compiler.is_compiling() else divisor_of(loss, new=True)
        if divisor is None:
            divisor = _divisor(target, weight, ignore_index)
            attach_divisor(loss, divisor)
    except RuntimeError:
        return None
    return divisor


class FunctionCall(NamedTuple):
    """A call of ``F.cross_entropy`` or ``F.nll_loss``, or a product of its result, in :func:`functional_losses`."""

    thread: threading.Thread | None
    """``None`` for calls within compiled functions."""
    needs_mode: bool
    """True if the graph of the result does not contain the divisor."""
    uneven: bool
    """True if the call has weighted its targets or ignored some, as far as this is known without waiting."""


class ClassLosses:
    """Count the calls of class losses in training that weight their targets or ignore some.

    Attributes
    ----------
    calls : Counter
        Number of such calls since :meth:`take`, as far as this is known without waiting for the device. By thread,
        since each replica of ``dp`` runs ``get_loss`` in its own.
    """

    def __init__(self) -> None:
        self.calls: Counter[threading.Thread] = Counter()

    def take(self) -> int:
        """Return the number of such calls of one ``get_loss`` since the last call of this method."""
        calls, self.calls = self.calls, Counter()
        return max(calls.values(), default=0)

    @contextmanager
    def of_libraries(self, *roots: nn.Module) -> Iterator[None]:
        """Count calls of criteria in ``roots`` that are not torch's and ignore some targets: most average the others.

        Those that call torch's have its divisor. Not in compiled models: with hooks, torch compiles again.
        """
        modules = [module for root in roots for module in root.modules()]
        with ExitStack() as undo:
            for module in modules if not any(map(is_compiled, modules)) else ():
                is_torchs = type(module).__module__.startswith("torch.")
                if type(getattr(module, "ignore_index", None)) is int and not is_torchs:
                    undo.callback(module.register_forward_hook(self._count_ignoring, with_kwargs=True).remove)
            yield

    def _count_ignoring(self, criterion: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> None:
        if not isinstance(loss, Tensor) or torch.compiler.is_compiling() or divisor_of(loss) is not None:
            return
        integers = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dtype == torch.int64]
        if any((target == criterion.ignore_index).any() for target in integers if not target.is_nested):
            self.calls[threading.current_thread()] += 1

    def add(self, calls: Iterable[FunctionCall]) -> None:
        """Count the calls that one ``get_loss`` has made."""
        for call in calls:
            if call.uneven and call.thread is not None:
                self.calls[call.thread] += 1


_FORWARDS: set[Any] = {
    getattr(nn, name).forward
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")  # the last one since torch 2.13
    if hasattr(nn, name)
}


@contextmanager
def class_criteria(*roots: Any) -> Iterator[None]:
    """Attach divisors to the losses of criteria of class indices, in an evaluation, where there are no graphs.

    A hook costs less than the mode of :func:`functional_losses`, which is then not needed after the first batch.

    Parameters
    ----------
    roots : object
        A model, and a criterion or a collection of criteria.
    """
    with ExitStack() as undo:
        for module in _class_modules(*roots):
            undo.callback(module.register_forward_hook(_after, with_kwargs=True).remove)
        yield


def has_class_criteria(*roots: Any) -> bool:
    """Return True if a model or a criterion contains a criterion of class indices, which some batches may not call."""
    return next(_class_modules(*roots), None) is not None


def _class_modules(*roots: Any) -> Iterator[nn.Module]:
    entries = [entry for root in roots for _, entry in leaves_of(root, "")]
    for module in (module for entry in entries if isinstance(entry, nn.Module) for module in entry.modules()):
        # A subclass that overrides forward may divide by anything.
        is_known = getattr(type(module), "forward", None) in _FORWARDS
        if is_known and getattr(module, "reduction", None) == "mean":
            yield module


def _after(criterion: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> None:
    target: Tensor = args[1] if len(args) > 1 else kwargs["target"]
    if target.is_floating_point():  # with class probabilities, torch takes the mean over samples
        return
    ignored = -100 if criterion.ignore_index is None else criterion.ignore_index
    if torch.compiler.is_compiling():
        attach_divisor(loss, _divisor(target, criterion.weight, ignored))
        return
    if _attach(loss, target, criterion.weight, ignored) is None:
        return
    found, thread = _found.get() or [], threading.current_thread()
    for i in range(len(found) - 1, -1, -1):
        if found[i].thread is thread:  # the entry of the function that this criterion calls
            del found[i]
            break


# An older compiler breaks a graph where a tensor gets an attribute: in an evaluation this is slow, but in training
# divisors are left out, as the graph may be meant to be whole.
_TRACES_ATTRIBUTES = torch.__version__ >= TorchVersion("2.13")


class _FunctionalLosses(TorchFunctionMode):
    """Attach divisors to the results of ``F.cross_entropy`` and ``F.nll_loss``, and to their products with numbers."""

    def __init__(self, found: list[FunctionCall]) -> None:
        super().__init__()
        self._found = found
        self.seen_by_compiler = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is innermost_mode:
            return answer_of(self, args)
        result = func(*args, **kwargs)
        if not _TRACES_ATTRIBUTES and torch.is_grad_enabled() and torch.compiler.is_compiling():
            return result
        if func in _OF_CLASSES:
            given = {**_DEFAULTS, **dict(zip(_OF_CLASSES[func], args)), **kwargs}
            target, weight = given["target"], given["weight"]
            ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
            means = given["reduction"] == "mean" and given["size_average"] is None and given["reduce"] is None
            if means and not target.is_floating_point():
                divisor = _attach(result, target, weight, ignored)
                ignores = isinstance(divisor, (int, float)) and divisor != target.numel()
                uneven = ignores or weight is not None or ignored >= 0
                self._note(attached_divisor(result) is not None, uneven)
        elif func in _PRODUCTS and isinstance(result, Tensor) and result.numel() == 1:
            divisors = [d for d in map(attached_divisor, args) if d is not None]
            if len(divisors) == 1:
                self._note(True, False)
                attach_divisor(result, divisors[0])
        return result

    def _note(self, needs_mode: bool, uneven: bool) -> None:
        if torch.compiler.is_compiling():
            self.seen_by_compiler = True  # it would compile again whenever the list has another length
        else:
            self._found.append(FunctionCall(threading.current_thread(), needs_mode, uneven))


def is_compiled(module: nn.Module) -> bool:
    """Return True for the result of ``torch.compile``, and for a module that was compiled in place."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


_FAST_IN_EVAL = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules which, in evaluation mode, compute other values at masked positions with a graph, and if a mode is active."""
_left: ContextVar[tuple[list[TorchFunctionMode], nn.Module] | None] = ContextVar("_left", default=None)
_ANY_TENSOR = torch.empty(0, device="cpu")


def innermost_mode(tensor: Tensor, calls: list[None]) -> Any:
    """Return this thread's innermost mode if it is one of this package, which answers by :func:`answer_of`."""
    calls.append(None)
    if has_torch_function((tensor,)):
        return handle_torch_function(innermost_mode, (tensor,), tensor, calls)
    return None


def answer_of(mode: TorchFunctionMode, args: tuple[Any, ...]) -> TorchFunctionMode | None:
    """Return a mode's result for :func:`innermost_mode`: with more calls, another mode has passed the call on."""
    return mode if len(args[1]) == 1 else None


def _has_fast_modules(model: nn.Module | None) -> bool:
    modules = () if model is None else model.modules()
    return any(isinstance(module, _FAST_IN_EVAL) and not module.training for module in modules)


def _leave_modes(module: nn.Module, args: Any) -> None:
    if isinstance(module, _FAST_IN_EVAL) and not module.training:
        left: list[TorchFunctionMode] = []
        while (mode := innermost_mode(_ANY_TENSOR, [])) is not None:
            mode.__exit__(None, None, None)
            left.append(mode)
        if left:
            _left.set((left, module))


def _return_to_modes(module: nn.Module, args: Any, output: Any) -> None:
    left = _left.get()
    if left is not None and left[1] is module:
        _left.set(None)
        for mode in reversed(left[0]):
            mode.__enter__()


@contextmanager
def outside_of_fast_modules(model: nn.Module | None) -> Iterator[None]:
    """Leave this package's modes in modules that would compute other values in any mode; not in compiled models.

    Hooks of the modules themselves would have the same effect as a mode, so these are hooks of all modules.
    """
    if model is None or not _has_fast_modules(model) or any(map(is_compiled, model.modules())):
        yield  # in compiled models: with such hooks, torch compiles again, and warns
        return
    with (
        register_module_forward_pre_hook(_leave_modes),
        register_module_forward_hook(_return_to_modes, always_call=True),
    ):
        yield


_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_DEFAULTS = dict(zip(_ARGUMENTS, (None, None, None, None, -100, None, "mean", 0.0), strict=True))
_OF_CLASSES: dict[Any, tuple[str, ...]] = {functional.cross_entropy: _ARGUMENTS, functional.nll_loss: _ARGUMENTS[:-1]}
"""Functions of class indices, with the names of their positional arguments."""
if hasattr(functional, "linear_cross_entropy"):  # since torch 2.13
    _OF_CLASSES[functional.linear_cross_entropy] = ("input", "linear_weight", "target")

# Python's operators pass the methods of Tensor. A dict, since the compiler of torch 2.6 can't look into a set.
_PRODUCTS: dict[Any, None] = dict.fromkeys(
    (
        *(torch.mul, torch.multiply, torch.div, torch.divide, torch.neg),
        *(Tensor.mul, Tensor.multiply, Tensor.div, Tensor.divide, Tensor.neg),
        *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__),
    )
)


def attached_divisor(value: Any) -> Tensor | float | None:
    """Return the divisor that :func:`attach_divisor` has attached, without a search of the graph."""
    return getattr(value, "trainloop_divisor", None) if isinstance(value, Tensor) else None


_found: ContextVar[list[FunctionCall] | None] = ContextVar("_found", default=None)


@contextmanager
def functional_losses(found: list[FunctionCall] | None = None, model: nn.Module | None = None) -> Iterator[None]:
    """Attach divisors to the results of ``F.cross_entropy`` and ``F.nll_loss`` whose graphs don't contain them.

    This costs a microsecond for each torch call. So an evaluation uses it for the first batch, and for later batches
    only if the first batch has made such a call, or the loop has no criterion. Training uses it for the first step of
    an epoch (of short epochs, in every 16th step), and for later ones only if a graph lacks the divisor: in compiled
    code, and for ``F.linear_cross_entropy`` in chunks.

    Parameters
    ----------
    found : list of FunctionCall, optional
        List that receives an entry for each such call. Default: the list of the surrounding context, which threads
        inherit by their context variables. If there is none, nothing is done.
    model : nn.Module, optional
        The model that runs within the context, also in other threads.
    """
    found = _found.get() if found is None else found
    if found is None:
        yield
        return
    token = _found.set(found)
    try:
        with outside_of_fast_modules(model), _FunctionalLosses(found) as mode:
            yield
        if mode.seen_by_compiler and not found:
            found.append(FunctionCall(None, True, False))
    finally:
        _found.reset(token)
