"""Loaders that each rank makes for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainloop.callbacks.base import AbstractCallback
from trainloop.errors import ConfigurationError

__all__ = ["InMultiProcessDataLoad"]


class InMultiProcessDataLoad(AbstractCallback):
    """Make loaders in each rank of ``ddp`` instead of sending them to the ranks.

    Pass this callback as ``fit(in_process_data_load=...)``; ``train_loader=None`` is then allowed. The loop shards
    these loaders like any others.

    Parameters
    ----------
    train_loader_build_fn, val_loader_build_fn, test_loader_build_fn : callable, optional
        Functions without arguments that return the loader. Default: the loop keeps its loader. A subclass can instead
        override :meth:`build_train_dataloader`, :meth:`build_val_dataloader` or :meth:`build_test_dataloader`; then
        pass ``True`` for that loader.

    Raises
    ------
    ConfigurationError
        If an argument is not callable, and a subclass does not implement the method either.

    Examples
    --------
    >>> load = InMultiProcessDataLoad(train_loader_build_fn=make_train_loader)
    >>> tl.fit(num_epochs=10, in_process_data_load=load)
    """

    def __init__(
        self,
        train_loader_build_fn: Callable[[], Any] | bool | None = None,
        val_loader_build_fn: Callable[[], Any] | bool | None = None,
        test_loader_build_fn: Callable[[], Any] | bool | None = None,
    ) -> None:
        super().__init__("InMultiProcessDataLoad")
        for name, build, own in (
            ("train_loader_build_fn", train_loader_build_fn, "build_train_dataloader"),
            ("val_loader_build_fn", val_loader_build_fn, "build_val_dataloader"),
            ("test_loader_build_fn", test_loader_build_fn, "build_test_dataloader"),
        ):
            overridden = getattr(type(self), own) is not getattr(InMultiProcessDataLoad, own)
            if not (build is None or build is False or callable(build) or (build is True and overridden)):
                raise ConfigurationError(
                    f"{type(self).__name__}: {name}={build!r}: must be a function that returns a loader, or None."
                )
        self.train_loader_build_fn = train_loader_build_fn
        self.val_loader_build_fn = val_loader_build_fn
        self.test_loader_build_fn = test_loader_build_fn

    def on_multiprocess_start(self) -> None:
        loop = self.train_loop_obj
        if self.train_loader_build_fn:
            loop.train_loader = self.build_train_dataloader()
        if self.val_loader_build_fn:
            loop.validation_loader = self.build_val_dataloader()
        if self.test_loader_build_fn:
            loop.test_loader = self.build_test_dataloader()

    def build_train_dataloader(self) -> Any:
        """Return the training loader, made in the rank."""
        return _call(self.train_loader_build_fn)

    def build_val_dataloader(self) -> Any:
        """Return the validation loader, made in the rank."""
        return _call(self.val_loader_build_fn)

    def build_test_dataloader(self) -> Any:
        """Return the test loader, made in the rank."""
        return _call(self.test_loader_build_fn)


def _call(build: Callable[[], Any] | bool | None) -> Any:
    assert callable(build), "checked at construction"
    return build()
