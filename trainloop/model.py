"""Define the base class of users' models: an ``nn.Module`` with its loss and its predictions."""

from __future__ import annotations

import inspect
import reprlib
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainloop._support.nested import map_parts
from trainloop.distributed import all_gather
from trainloop.errors import ConfigurationError

__all__ = ["ModelWrap", "TTBasicModel", "TTModel"]


OF_LOGS = frozenset(("_log_sink", "_log_batch_size"))
"""Attributes of a model by which it logs into a running loop."""


class TTModel(nn.Module, ABC):
    """An ``nn.Module`` that computes the loss and the predictions of a batch, too.

    Write ``forward``, :meth:`get_loss` and :meth:`get_predictions`. The same class trains in every mode. Batches are
    already on ``device``, so ``.to(device)`` copies nothing.

    Examples
    --------
    >>> class Net(TTModel):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = nn.Linear(64, 10)
    ...     def forward(self, x):
    ...         return self.fc(x)
    ...     def get_loss(self, batch_data, criterion, device):
    ...         x, y = batch_data
    ...         return criterion(self(x.to(device)), y.to(device))
    ...     def get_predictions(self, batch_data, device):
    ...         x, y = batch_data
    ...         return self(x.to(device)).argmax(1), y, {}
    """

    carried_state: Mapping[str, int] = {}
    """Attributes that carry state from batch to batch, each with its batch dimension, such as ``{"hidden": 1}``. Each
    rank has its own values, and checkpoints store them; see :class:`trainloop.data.SplitBatches`."""

    # torch.jit.script can't read these annotations.
    __jit_ignored_attributes__ = ("carried_state", "loss_reduction")

    loss_reduction: str | None = None
    """Reduction of a batch's samples in :meth:`get_loss`: ``'sum'``, ``'mean'``, or ``None`` for the criterion's
    ``reduction`` (the mean if the criterion has no such attribute)."""

    def __init__(self) -> None:
        super().__init__()
        # AIToolbox models list the attributes that a wrapper must forward. Here, all attributes are forwarded, so this
        # list is unused.
        self.transfer_model_attributes: list[str] = []

    @abstractmethod
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        """Return the loss of one batch.

        Parameters
        ----------
        batch_data
            A batch of the loader.
        criterion
            The loop's ``criterion``.
        device : torch.device
            The model's device.

        Returns
        -------
        Tensor, tuple of (Tensor, weight), or MultiLoss
            A 0-d loss: the mean over the batch's samples, or their sum if :attr:`loss_reduction` or the criterion's
            ``reduction`` is ``'sum'``. In a tuple, the loss (or MultiLoss) is a mean over units (such as tokens), and
            the weight is the number of units. Micro-batches and ranks are weighted by this number. In a MultiLoss, each
            loss may have its own weight. Without a weight, each loss of a criterion with class weights or ignored
            targets has that criterion's divisor as its weight, also if it is multiplied by a number.

        Yields
        ------
        tuple of (name or index, loss), or loss
            A method written as a generator yields losses in the order of their steps. After each ``yield``, the named
            optimizer (or each of several, in a tuple) has stepped, and the code that follows uses the new weights. A
            loss is a Tensor or ``(Tensor, weight)``. If there is only one optimizer, the loss needs no name.
        """

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        """Return the loss of one batch in evaluation. Default: :meth:`get_loss`."""
        return self.get_loss(batch_data, criterion, device)

    @abstractmethod
    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        """Return ``(y_pred, y_true, metadata)`` of one batch, with a row for each sample. ``y_true`` may be None.

        Rows may be tensors, arrays, lists of any objects, or nested dicts and tuples of these. ``metadata`` is a dict.
        Return several outputs as a tuple or dict, because the items of a list are rows. (A list of arrays that can't be
        rows, such as ``default_collate`` makes of a tuple of targets, is a tuple in the result.)
        If the rows of tensors or arrays have different shapes in different batches, the result is a list of rows.
        """

    def on_epoch_begin(self) -> None:
        """Reset the state that the model carries from batch to batch. Called before the first batch of an epoch.

        It is not called if a run resumes in the middle of an epoch. The loop calls the hooks of its model only.
        In these, call those of a ``TTModel`` within the model: ``self.encoder.on_epoch_begin()``.
        """

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        """Called before a pass over a dataset for its loss or predictions, inside or outside ``fit``.

        If a model carries state from batch to batch (such as a recurrent network trained on one long text), save its
        training state here, and start with a new state. This hook is called before the callbacks' hook of that name,
        with the same ``dataset_info``: see :meth:`~.AbstractCallback.on_evaluation_begin`.

        Examples
        --------
        >>> class Recurrent(TTModel):
        ...     def on_epoch_begin(self):
        ...         self.hidden = None
        ...     def on_evaluation_begin(self, dataset_info):
        ...         self.kept, self.hidden = self.hidden, None
        ...     def on_evaluation_end(self, dataset_info):
        ...         self.hidden = self.kept
        """

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        """Called after the last batch of a pass, unless the pass ended with an exception."""

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: str = "mean",
        sync_dist: bool = True,
        batch_size: Tensor | float | None = None,
        prog_bar: bool = False,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a metric, from any method of the model. If no loop is running, do nothing.

        The value is copied on its device, and the copy stays there until logs are flushed. A call takes a microsecond
        or two and never waits for the device. Later changes to the tensor have no effect on the metric.

        Parameters
        ----------
        name : str
            Name in ``history`` and TensorBoard. In validation and test it gets the prefix ``val_`` or ``test_``.
        value : 0-d Tensor or number
            Value to record; a tensor with one element counts as 0-d.
        on_step, on_epoch : bool, optional
            ``on_step``: keep the value of each step. ``on_epoch``: keep the value of the epoch. Default: both in a
            training step, otherwise only ``on_epoch``.
        reduce : {'mean', 'sum', 'min', 'max'}
            How values are reduced over micro-batches, steps and ranks. A mean is weighted by ``batch_size``.
        sync_dist : bool
            Reduce over all ranks; if False, each rank keeps its own value.
        batch_size : int or 0-d Tensor, optional
            Weight of the value in a mean. A value with weight 0 doesn't count, even if it is NaN. Default: the number
            of samples in the batch, or 1 between steps.
        prog_bar : bool
            Show this rank's latest value in the progress bar.
        rank_zero_only : bool
            Keep only rank 0's values, without an exchange. Callbacks can't monitor this metric.

        Raises
        ------
        ConfigurationError
            If the value is not a scalar, if the loop itself records a metric with this name (such as ``loss``), or if
            the metric was logged with other options before.
        """
        sink = self.__dict__.get("_log_sink")
        if sink is not None:
            if batch_size is None:
                batch_size = self.__dict__.get("_log_batch_size")
            sink(name, value, (on_step, on_epoch, reduce, sync_dist, prog_bar, rank_zero_only), batch_size)

    @property
    @torch.jit.unused  # torch.jit.script would compile it otherwise
    def device(self) -> torch.device:
        """Device of the model's parameters, or of its buffers; the CPU if the model has neither."""
        for module in self.modules():
            # Replicas of nn.DataParallel keep their parameters under another name.
            for tensors in (module._parameters, module.__dict__.get("_former_parameters", {}), module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        return tensor.device
        return torch.device("cpu")

    @device.setter
    @torch.jit.unused
    def device(self, value: Any) -> None:
        raise ConfigurationError(
            f"{type(self).__name__}.device = {value!r}: TTModel.device is the device on which the model is; it can't "
            "be set. Leave the assignment out (the loop moves the model and the batches), or choose another name."
        )

    def all_gather(self, value: Any, *, concat: bool = False) -> Any:
        """Return ``value`` (nested tensors and numbers) of all ranks, with a new leading axis for the ranks.

        Collective: every rank must call this method, with equal shapes. With ``concat=True``, values are joined along
        their first axis instead, and the length of this axis may differ between ranks. Gradients flow back to the
        tensors of every rank, so a loss over the rows of all ranks trains as in one process; see
        :func:`~.distributed.all_gather`.

        In evaluations and predictions, each rank has whole batches, which one process would see one after another.
        There, as in one process, the result has this rank's values only: the new axis has length 1, or with ``concat``
        the value is unchanged. In ``dp``, a replica has only a part of the batch, so the call is an error.
        """

        return all_gather(value, concat=concat)

    def __getstate__(self) -> dict[str, Any]:
        # The object that receives logged values is part of the running loop, so a copy of the model does not get it.
        state = super().__getstate__()  # without what compile() has put into the model: it would run the model itself
        return {key: value for key, value in state.items() if key not in OF_LOGS}


class TTBasicModel(TTModel, ABC):
    """A model for batches of the form ``(*inputs, target)``. You write only ``forward(*inputs)``."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        """Return ``criterion(self(*inputs), target)``."""
        *inputs, target = _inputs_and_target(batch_data)
        if not callable(criterion):
            raise ConfigurationError(
                f"{type(self).__name__}.get_loss calls the criterion, but criterion is {reprlib.repr(criterion)}. Pass "
                "a callable, as in TrainLoop(criterion=nn.CrossEntropyLoss()), or write a get_loss of your own."
            )
        return criterion(self(*[_moved_to(x, device) for x in inputs]), _moved_to(target, device))

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        """Return the model's outputs unchanged, the targets, and no metadata."""
        *inputs, target = _inputs_and_target(batch_data)
        return self(*[_moved_to(x, device) for x in inputs]), target, {}


class ModelWrap(TTModel):
    """Train a plain ``nn.Module`` with a separate definition of its loss and predictions.

    Parameters
    ----------
    module : nn.Module
        Module to train; available as ``.model``.
    feed : object
        Object with ``get_loss(model, batch_data, criterion, device)``, ``get_predictions(model, batch_data, device)``
        and optionally ``get_loss_eval``; for example a
        :class:`trainloop.data.batch_model_feed_defs.AbstractModelFeedDefinition`.
    """

    def __init__(self, module: nn.Module, feed: Any) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"module={module!r}: must be an nn.Module.")
        missing = [name for name in ("get_loss", "get_predictions") if not callable(getattr(feed, name, None))]
        if missing:
            raise ConfigurationError(
                f"feed={feed!r} has no {' and no '.join(missing)}. Add what is missing: see ModelWrap."
            )
        self.model = module
        self.batch_model_feed_def = feed
        self.loss_reduction = getattr(feed, "loss_reduction", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's output."""
        return self.model(*args, **kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the wrapped module for ``torch.jit.script``, which can't compile ``*args``."""
        return self.model

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        """Return the feed's loss."""
        return self.batch_model_feed_def.get_loss(self.model, batch_data, criterion, device)

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        """Return the result of the feed's ``get_loss_eval`` or, if it is missing, of ``get_loss``."""
        feed = self.batch_model_feed_def
        return getattr(feed, "get_loss_eval", feed.get_loss)(self.model, batch_data, criterion, device)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        """Return the feed's predictions."""
        return self.batch_model_feed_def.get_predictions(self.model, batch_data, device)


def yields_losses(model: Any, method: str = "get_loss") -> bool:
    """Return True if a model's ``get_loss`` is a generator, which yields a loss for each optimizer step."""
    if method == "get_loss_eval" and getattr(type(model), method, None) is TTModel.get_loss_eval:
        method = "get_loss"
    function = getattr(model, method, None)
    # ModelWrap.get_loss only returns the result of the feed's get_loss, and is not a generator function itself.
    if isinstance(model, ModelWrap):
        feed = model.batch_model_feed_def
        function = getattr(feed, method, feed.get_loss)
    # The function is inspected, not called, because the kind of training is decided before the first call.
    return callable(function) and inspect.isgeneratorfunction(inspect.unwrap(function))


_CALLED_WITH = {
    "get_loss": ("batch_data", "criterion", "device"),
    "get_loss_eval": ("batch_data", "criterion", "device"),
    "get_predictions": ("batch_data", "device"),
}


def check_signatures(model: Any) -> None:
    """Raise an error if a method of the model, or of its feed, can't be called with the loop's arguments.

    Raises
    ------
    ConfigurationError
        If a call would certainly fail. A method whose real signature is unknown, such as a decorator's ``*args``
        wrapper, is accepted.
    """
    owner, before = (model.batch_model_feed_def, ("model",)) if isinstance(model, ModelWrap) else (model, ())
    for name, given in _CALLED_WITH.items():
        method = getattr(owner, name, None)
        function = getattr(method, "__func__", method)
        if not isinstance(function, types.FunctionType) or hasattr(function, "__signature__"):
            continue
        # A decorator may change the arguments, so its wrapper is checked, not the wrapped function.
        signature = inspect.signature(method, follow_wrapped=False)  # type: ignore[arg-type]
        given = (*before, *given)
        try:
            signature.bind(*given)
        except TypeError as error:
            raise ConfigurationError(
                f"{type(owner).__name__}.{name} takes {signature}, but is called with ({', '.join(given)}): {error}. "
                f"Define it as {name}({', '.join(('self', *given))})."
            ) from None


def check_names(model: nn.Module) -> None:
    """Raise an error if a submodule, parameter or buffer has the name of a member of ``TTModel``, which hides it.

    Python finds ``TTModel.log`` before the module that ``self.log = nn.Linear(8, 8)`` has registered.
    """
    for name, part in model.named_modules():
        if not isinstance(part, TTModel):
            continue
        for kind in ("module", "parameter", "buffer"):
            for own in part.__dict__[f"_{kind}s"]:
                if hasattr(TTModel, own):
                    where = f"{type(model).__name__}{f'.{name}' if name else ''}"
                    raise ConfigurationError(
                        f"{where}.{own} is a {kind}, but {own} is a member of TTModel, which Python finds first. "
                        f"Choose another name, for example {own}_{kind}."
                    )


def _inputs_and_target(batch_data: Any) -> Any:
    """Return a batch of the form ``(*inputs, target)``; raise an error for any other batch."""
    if not isinstance(batch_data, (list, tuple)) or len(batch_data) < 2:
        size = f" of length {len(batch_data)}" if isinstance(batch_data, (list, tuple)) else ""
        raise ConfigurationError(
            f"TTBasicModel needs batches (*inputs, target), but got a {type(batch_data).__name__}{size}. For other "
            "batches, subclass TTModel, and write get_loss and get_predictions."
        )
    return batch_data


def _moved_to(value: Any, device: torch.device) -> Any:
    if type(value) is Tensor and value.device == device:
        return value
    if hasattr(value, "to"):  # checked first, because a PackedSequence is a tuple, too
        return value.to(device)
    return map_parts(lambda part: _moved_to(part, device), value)
