"""Read a metric from the history, each value once, for callbacks that decide by this metric."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from trainloop._support.keywords import nearest
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import choice_of
from trainloop.errors import ConfigurationError

__all__ = ["Monitor", "lower_is_better"]

Mode = Literal["auto", "min", "max"]

_ALMOST_SAME = 0.9  # how similar a name must be to count as misspelt before the end of the epoch
_NEAR = 0.75  # how similar a name must be for an error message to suggest it

# scikit-learn's names of scorers, for which greater is better. ("neg_loss" may be the loss of negative pairs.)
_SCORERS = re.compile(
    r"(^|_)(neg_(log_loss|brier_score|negative_likelihood_ratio|\w*(error|deviance))|positive_likelihood_ratio"
    r"|neg(ative)?_(mae|r?mse|r?msle|s?mape)|d2_\w+_score|explained_variance)($|_)"
)
# Words in names of metrics. The first group takes precedence, as in "accuracy_loss". As in scikit-learn, a higher
# "score" is better.
_LOWER_WINS = frozenset("loss error err brier".split())
_LOWER = frozenset(
    """mae mse rmse msle rmsle mape smape nll logloss perplexity ppl entropy bce ce kl divergence hinge hamming wer cer
    mer eer ece fid kid lpips ter deviance regret crps pinball bouldin winkler""".split()
)
_HIGHER = frozenset(
    """accuracy acc f1 fbeta dice jaccard iou miou auc auroc auprc aucpr roc ap map precision recall sensitivity
    specificity r2 mcc matthews kappa bleu rouge meteor chrf ndcg mrr psnr ssim snr sdr score top hits reward
    return pearson spearman kendall corr correlation sharpe csi""".split()
)


class Monitor:
    """The newest value of one metric in the loop's history.

    Decisions that are based on this value are the same on all ranks, because the history is.

    Parameters
    ----------
    name : str
        Name in ``history``.
    mode : {'auto', 'min', 'max'}
        ``'min'`` if lower is better, ``'max'`` if higher is; ``'auto'`` decides by words in the name (``loss``), or, if
        the model or a callback has a torchmetrics metric of that name, by its ``higher_is_better``.
    owner : str
        Name of the callback to mention in error messages.
    judges : bool
        False if the callback only reads the metric, so that its direction does not matter.

    Raises
    ------
    ConfigurationError
        If ``mode`` is invalid or ``name`` is not a string; at ``fit``, if ``'auto'`` can't decide.

    Warns
    -----
    UserWarning
        If ``mode`` contradicts the name, as in ``Monitor("val_loss", mode="max")``.

    Examples
    --------
    >>> Monitor("val_loss").improves(0.5, best=1.0), Monitor("val_accuracy").improves(0.5, best=1.0)
    (True, False)
    """

    def __init__(self, name: str, mode: Mode = "auto", owner: str = "Monitor", *, judges: bool = True) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{owner}: monitor={name!r}: must be the name of a metric, such as 'val_loss'.")
        choice_of(owner, "mode", mode, "auto", "min", "max")
        self.name = name
        self.owner = owner
        by_name = lower_is_better(name)
        self._minimize = {"min": True, "max": False, "auto": by_name}[mode]
        if judges and by_name not in (None, self._minimize):
            warn(
                f"{owner}: monitor={name!r}, mode={mode!r}: by its name, {'lower' if by_name else 'higher'} is better, "
                f"so the worst value would count as the best. Leave mode out, or pass mode='{_mode_of(by_name)}'. If "
                f"{_mode_of(not by_name)!r} is right, rename the metric, or ignore this."
            )
        self._seen = 0
        self._seen_step = -1  # the step of the newest value that was read within an epoch
        self._seen_epoch = -1  # the epoch in which a value without a step was read
        self._seen_value = ""  # the number of that value, and the value, which may be replaced
        self._resumed_epoch = 0  # values of earlier epochs are not new

    @property
    def minimize(self) -> bool:
        """True if lower is better."""
        if self._minimize is None:
            raise self._undirected()
        return self._minimize

    @property
    def mode(self) -> Mode:
        """``'min'`` if lower is better, ``'max'`` if higher is."""
        return _mode_of(self.minimize)

    def _undirected(self, hint: str = "") -> ConfigurationError:
        return ConfigurationError(
            f"{self.owner}: monitor={self.name!r}: this name does not show whether lower or higher is better. Pass "
            f"mode='min' or mode='max'.{hint}"
        )

    def check(self, loop: Any) -> None:
        """Raise ConfigurationError if the run can't produce the metric, or its direction is unknown.

        Called at registration. Only values that the loop records afterwards are new.
        """
        cut = getattr(loop, "cut", None)
        self._seen = loop.history.num_kept(self.name, loop.epoch if cut is None else cut["place"]["epoch"])
        self._seen_step = max(loop.history.step_indices(self.name), default=-1)
        self._seen_value = self._shown_progress(loop)
        if self._minimize is None:
            higher = _by_torchmetrics(self.name, loop)
            self._minimize = None if higher is None else not higher
        if self._minimize is None:
            losses = ["loss"] if loop.validation_loader is None else ["loss", "val_loss"]
            known = list(dict.fromkeys([*losses, *loop.history]))
            names = ", ".join(repr(name) for name in known)
            raise self._undirected(
                f" Or is the name misspelt? Metrics known before training: {names}. The model and callbacks may log "
                "more.",
            )
        if self.name == "val_loss" and loop.validation_loader is None:
            raise ConfigurationError(
                f"{self.owner}: monitor='val_loss', but the loop has no validation_loader. "
                "Pass one to TrainLoop, or monitor another metric, such as 'loss'."
            )

    def begin(self, loop: Any) -> None:
        """Called in ``on_train_begin``. In a resumed run, only values after the checkpoint are new.

        If the checkpoint has the state of this metric, it is loaded afterwards.
        """
        if getattr(loop, "resumed", False):
            self._resumed_epoch, self._seen_step = loop.epoch, loop.global_step

    def about_name(self, loop: Any, logged: Iterable[str]) -> str:
        """Return a warning if the name is probably misspelt, after the first step ``logged`` its metrics; or ``''``.

        The metric may still appear at the end of the epoch, so only names that are nearly the same count.
        """
        names = list(dict.fromkeys(["loss", *logged, *loop.history]))
        if loop.validation_loader is not None:
            names += [f"val_{name}" for name in names if not name.startswith(("val_", "test_"))]
        meant = None if self.name in names else nearest(self.name, names, _ALMOST_SAME)
        if meant is None:
            return ""
        return (
            f"{self.owner}: monitor={self.name!r} is not among the metrics of the first step. Did you mean {meant!r}? "
            "If nothing logs it by the end of the first epoch, the training ends there with an error."
        )

    def new_value(self, loop: Any, *, due: bool = True, within: bool = False) -> float | None:
        """Return the metric's newest value; ``None`` if that value was already read, or the metric has no value yet.

        ``within`` is True if the metric is read at steps; ``due`` is False before the first of them.

        Raises
        ------
        ConfigurationError
            If the history does not have the metric, or only rank 0 knows it.
        """
        if self.name in getattr(loop, "rank_zero_only_metrics", ()):
            raise ConfigurationError(
                f"{self.owner}: monitor={self.name!r} was logged with rank_zero_only=True: the other ranks don't "
                "have it, but all ranks must make the same decision. Log it without rank_zero_only."
            )
        values = loop.history.get(self.name)
        if not values:
            if not due or self._appears_later(loop) or (within and loop.history.step_indices(self.name)):
                return None
            names = ", ".join(repr(name) for name in loop.history) or "none yet"
            meant = nearest(self.name, loop.history, _NEAR)
            hint = "" if meant is None else f" Did you mean {meant!r}?"
            raise ConfigurationError(
                f"{self.owner}: monitor={self.name!r} is not in the history after epoch {loop.epoch + 1}. The history "
                f"has: {names}.{hint} Monitor one of these, or call self.log({self.name!r}, value) in the model."
            )
        if self._resumed_epoch:
            earlier = sum(epoch < self._resumed_epoch for epoch in loop.history.epochs(self.name))
            self._seen, self._resumed_epoch = max(self._seen, earlier), 0
        if len(values) == self._seen:
            return None  # the metric is evaluated only every n epochs: the last value must not count twice
        self._seen = len(values)
        return float(values[-1])

    def left_for_epoch_end(self, loop: Any, *, due: bool) -> float | None:
        """Like :meth:`new_value`, for a metric that is read at steps; ``None`` if it is recorded within epochs."""
        value = self.new_value(loop, due=due, within=True)
        was_within = loop.history.step_indices(self.name) or self._seen_epoch == loop.history_epoch
        return None if was_within else value

    def newest_within(self, loop: Any, *, ranks: bool = False) -> float | None:
        """Return the newest value of a metric that is recorded within epochs, each once; else ``None``. Collective.

        With ``ranks``, for checkpoints, the logs have just been exchanged, and a value may be returned again. A metric
        that every step logs, such as an accuracy in training, then has no value: its mean over the epoch ranks the
        checkpoint.
        """
        if not ranks:
            loop.running.share_logs()
        history, steps = loop.history, loop.history.step_indices(self.name)
        if steps:
            at_some_steps = len(steps) < steps[-1] - steps[0] + 1 or (len(steps) == 1 and steps[0] > 1)
            is_new, self._seen_step = steps[-1] > self._seen_step, steps[-1]
            return float(history.steps(self.name)[-1]) if (at_some_steps if ranks else is_new) else None
        epochs = history.epochs(self.name)
        if not epochs or epochs[-1] != loop.history_epoch:
            return None
        shown = self._shown_progress(loop)
        if not ranks and shown == self._seen_value:
            return None
        self._seen_value, self._seen_epoch = shown, epochs[-1]
        return float(history[self.name][-1])

    def _shown_progress(self, loop: Any) -> str:
        values = loop.history.get(self.name, ())
        return f"{len(values)}: {values[-1]}" if values else ""

    def _appears_later(self, loop: Any) -> bool:
        every = loop.end_auto_eval
        return self.name.startswith("val_") and every is not True and loop.epoch + 1 < every

    def improves(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Return True if ``value`` is better than ``best`` by more than ``min_delta``; False if ``value`` is NaN."""
        if best is None:
            return value == value
        return value < best - min_delta if self.minimize else value > best + min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "step": self._seen_step, "epoch": self._seen_epoch, "value": self._seen_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._resumed_epoch = state["seen"], 0
        self._seen_step = state.get("step", self._seen_step)  # older checkpoints lack it
        self._seen_epoch = state.get("epoch", self._seen_epoch)
        self._seen_value = state.get("value", self._seen_value)


def _mode_of(minimize: bool) -> Mode:
    return "min" if minimize else "max"


def lower_is_better(name: str) -> bool | None:
    """Return True if a metric's name shows that lower is better, False if higher is better, None if it is unclear.

    Examples
    --------
    >>> lower_is_better("val_loss"), lower_is_better("val_f1"), lower_is_better("neg_log_loss")
    (True, False, False)
    """
    if _SCORERS.search(name):
        return False
    texts = name.lower() + " " + re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()  # splits camel case, too
    words = {word for part in re.findall(r"[a-z]+[0-9]*", texts) for word in (part, part.rstrip("0123456789"))}
    if words & _LOWER_WINS:
        return True
    lower, higher = bool(words & _LOWER), bool(words & _HIGHER)
    return None if lower == higher else lower


def _by_torchmetrics(name: str, loop: Any) -> bool | None:
    """Return ``higher_is_better`` of the torchmetrics metric of that name; ``None`` if it is unknown."""
    if "torchmetrics" not in sys.modules:  # no metric can exist before the import
        return None
    stem = re.sub("^(train_end_)?(train_|val_|test_)", "", name).lower()
    # If two metrics of this name contradict each other, the direction is unknown.
    found = {higher for known, higher in _torchmetrics_of(loop) if known.lower() == stem and higher is not None}
    return found.pop() if len(found) == 1 else None


def _torchmetrics_of(loop: Any) -> Iterator[tuple[str, bool | None]]:
    """Yield ``(name, higher_is_better)`` for each name that a metric of the model or a callback may be logged under."""
    from torchmetrics import Metric, MetricCollection

    def named(name: str, value: Any) -> Iterator[tuple[str, bool | None]]:
        if isinstance(value, (MetricCollection, Mapping)):
            for key, item in value.items():
                yield from named(str(key), item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from named("", item)
        elif isinstance(value, Metric):
            kind = type(value).__name__
            for known in (name, kind, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind)):
                yield known, value.higher_is_better

    for path, module in loop.model.named_modules():
        yield from named(path.rpartition(".")[2], module)
    for callback in loop.callbacks:
        yield from named("", getattr(callback, "result_package", None))
