"""A metric that a callback decides by: found in the history once it is there, read once for each new value."""

from __future__ import annotations

from typing import Any, Literal

from trainloop.errors import ConfigurationError

__all__ = ["Monitor"]

Mode = Literal["auto", "min", "max"]


class Monitor:
    """The newest value of one metric in the loop's history.

    The history is the same on all ranks, so decisions made by it are too.

    Parameters
    ----------
    name : str
        Name in ``history``.
    mode : {'auto', 'min', 'max'}
        Whether lower or higher is better; ``'auto'``: lower for names with ``loss`` or ``error`` in them.
    owner : str
        Callback in whose name errors are raised.

    Raises
    ------
    ConfigurationError
        If ``mode`` is none of the three, or ``name`` is no string.

    Examples
    --------
    >>> Monitor("val_loss").improves(0.5, best=1.0), Monitor("val_accuracy").improves(0.5, best=1.0)
    (True, False)
    """

    def __init__(self, name: str, mode: Mode = "auto", owner: str = "Monitor") -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{owner}: monitor={name!r}: must be the name of a metric, such as 'val_loss'.")
        if mode not in ("auto", "min", "max"):
            raise ConfigurationError(f"{owner}: mode={mode!r}: must be 'auto', 'min' or 'max'.")
        self.name = name
        self.owner = owner
        if mode == "auto":
            mode = "min" if any(word in name.lower() for word in ("loss", "error")) else "max"
        self.minimize = mode == "min"
        self._seen = 0

    def check(self, loop: Any) -> None:
        """Refuse, at registration, a metric that can't come."""
        if self.name == "val_loss" and loop.validation_loader is None:
            raise ConfigurationError(
                f"{self.owner}: monitor='val_loss', but the loop has no validation_loader. "
                "Pass one to TrainLoop, or monitor another metric, such as 'loss'."
            )

    def new_value(self, loop: Any) -> float | None:
        """The metric's newest value; ``None`` where it has none that was not read before.

        Raises
        ------
        ConfigurationError
            If there is no such metric, or if only rank 0 knows it.
        """
        if self.name in getattr(loop, "rank_zero_only_metrics", ()):
            raise ConfigurationError(
                f"{self.owner}: monitor={self.name!r} was logged with rank_zero_only=True: the other ranks don't know "
                "it, and all must decide alike. Log it without rank_zero_only."
            )
        values = loop.history.get(self.name)
        if not values:
            if self._comes_later(loop):
                return None
            names = ", ".join(repr(name) for name in loop.history) or "none yet"
            raise ConfigurationError(
                f"{self.owner}: monitor={self.name!r} is not in the history after epoch {loop.epoch + 1}. "
                f"There are: {names}. Monitor one of these, or log it: self.log({self.name!r}, value) in the model."
            )
        if len(values) == self._seen:
            return None  # evaluated every n epochs only: an old value must not count twice
        self._seen = len(values)
        return float(values[-1])

    def _comes_later(self, loop: Any) -> bool:
        every = getattr(loop, "end_auto_eval", True)
        return self.name.startswith("val_") and every is not True and loop.epoch + 1 < every

    def improves(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Whether ``value`` is better than ``best`` by more than ``min_delta``; never where ``value`` is NaN."""
        if best is None:
            return value == value
        return value < best - min_delta if self.minimize else value > best + min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]
