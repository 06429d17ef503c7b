"""Trials of a running search: the folds that wait, train and have ended, and the line that shows them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from trainloop._support.output import bar_size
from trainloop.resources import Plan
from trainloop.tuning.result import Trial, best_of, short


@dataclass
class Running:
    """A trial that has begun. Its state is ``interrupted`` until all its folds have ended."""

    trial: Trial
    """The trial and its results so far."""
    waiting: list[int] = field(default_factory=list)
    """Folds that have not started yet."""
    training: dict[int, int] = field(default_factory=dict)
    """Folds that are training, and the slot of each fold."""

    @property
    def over(self) -> bool:
        return not self.waiting and not self.training

    def add(self, fold: int, result: dict[str, Any]) -> None:
        """Add the result of a fold that finished now or in an earlier run."""
        trial = self.trial
        trial.scores[fold] = result["score"]
        trial.seconds += result["seconds"]
        trial.cpu_seconds += result.get("cpu_seconds", 0.0)
        trial.facts[fold] = result.get("facts", {})
        trial.cpus = max(trial.cpus, result.get("cpus", 0))
        trial.gpus = max(trial.gpus, result.get("gpus", 0.0))

    def end(self) -> None:
        """Set the state of a trial whose folds have all ended."""
        failed = self.trial.scores.count(None)
        self.trial.state = "done" if not failed else "partial" if failed < len(self.trial.scores) else "failed"

    def interrupt(self, why: str = "the search was interrupted") -> None:
        """Mark training and waiting folds as interrupted."""
        why = why[0].upper() + why[1:]
        for fold in self.training:
            self.trial.errors[fold] = f"{why} while this fold trained."
        for fold in self.waiting:
            self.trial.errors[fold] = f"{why} before this fold began."
        self.training.clear()
        self.waiting.clear()


class View:
    """Display of trials, folds and used resources: one line that is redrawn or, in a log, one line per ended trial."""

    def __init__(self, division: Plan, mode: str, progress: bool) -> None:
        self._plan = division
        self._mode = mode
        self._progress = progress
        self._live = progress and sys.stderr.isatty()
        self._printed = 0

    def __enter__(self) -> View:
        from tqdm import tqdm

        total = self._plan.num_trials * self._plan.num_folds
        shape = "{desc} |{bar}| {n_fmt}/{total_fmt} folds [{elapsed}]{postfix}"
        options: dict[str, Any] = {"disable": not self._live, "file": sys.stderr, **bar_size()}
        self._bar = tqdm(total=total, desc="tune", bar_format=shape, **options)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def show(self, begun: list[Running]) -> None:
        """Show the current state."""
        over = sum(running.over for running in begun)
        if self._live:
            self._bar.n = sum(len(r.trial.scores) - r.trial.scores.count(None) + len(r.trial.errors) for r in begun)
            self._bar.set_postfix_str(self.line(begun))
        elif self._progress and over > self._printed:
            print(f"tune: {self.line(begun)}", file=sys.stderr, flush=True)
        self._printed = over

    def print_failure(self, trial: Trial, fold: int) -> None:
        """Print one line with the reason why a fold has no result. The search's result has the complete error."""
        if self._progress:
            text = f"tune: fold {fold} of trial {trial.number} failed: {short(trial.errors[fold])}"
            self._bar.write(text, file=sys.stderr)

    def line(self, begun: list[Running]) -> str:
        """Return the current state as one line of text."""
        now = [running for running in begun if running.training]
        models = sum(len(running.training) for running in now)
        quota = self._plan.per_model
        over = [running.trial for running in begun if running.over]
        states = Counter("failed" if trial.state == "partial" else trial.state for trial in over)
        interrupted = f", {states['interrupted']} interrupted" if states["interrupted"] else ""
        best = best_of(over, self._mode)
        return (
            f"{states['done']} of {self._plan.num_trials} trials done, {len(now)} running, "
            f"{states['failed']} failed{interrupted}; "
            f"CPUs {models * int(quota.num_cpus)}/{self._plan.total.num_cpus}, "
            f"GPUs {models * float(quota.num_gpus):.4g}/{float(self._plan.total.num_gpus):.4g}"
            + ("" if best is None else f"; best {best.score:.5g} (trial {best.number})")
        )

    def last(self, begun: list[Running], interrupted: bool) -> None:
        """Show the final state."""
        if self._progress:
            ended = "was interrupted" if interrupted else "has finished"
            print(f"tune {ended}: {self.line(begun)}", file=sys.stderr, flush=True)
