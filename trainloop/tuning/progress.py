"""Running trials and their display."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from trainloop._support.screen import bar_size
from trainloop.resources import Plan
from trainloop.tuning.result import Trial, best_of

__all__ = ["Running", "View"]


@dataclass
class Running:
    """A trial that has begun. Until it is over, its state is ``interrupted``."""

    trial: Trial
    """The trial, with its results so far."""
    waiting: list[int] = field(default_factory=list)
    """Folds that have not started yet."""
    training: dict[int, int] = field(default_factory=dict)
    """Folds that are training, and the slot of each among the models that run at once."""

    @property
    def over(self) -> bool:
        return not self.waiting and not self.training

    def add(self, fold: int, result: dict[str, Any]) -> None:
        """Add the result of a fold that finished, now or in an earlier run."""
        trial = self.trial
        trial.scores[fold] = result["score"]
        trial.seconds += result["seconds"]
        trial.cpu_seconds += result.get("cpu_seconds", 0.0)
        trial.facts[fold] = result.get("facts", {})
        trial.cpus = max(trial.cpus, result.get("cpus", 0))
        trial.gpus = max(trial.gpus, result.get("gpus", 0.0))

    def end(self) -> None:
        """Set the state of a trial whose folds have all ended."""
        lost = self.trial.scores.count(None)
        self.trial.state = "done" if not lost else "partial" if lost < len(self.trial.scores) else "failed"

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
    """Display of trials, folds and used resources: one line, redrawn; in a log a line for each trial that ends."""

    def __init__(self, division: Plan, mode: str, progress: bool) -> None:
        self._plan = division
        self._mode = mode
        self._progress = progress
        self._live = progress and sys.stderr.isatty()
        self._printed = 0
        self._bar: Any = None

    def __enter__(self) -> View:
        if self._live:
            from tqdm import tqdm

            total = self._plan.num_trials * self._plan.num_folds
            shape = "{desc} |{bar}| {n_fmt}/{total_fmt} folds [{elapsed}]{postfix}"
            self._bar = tqdm(total=total, desc="tune", bar_format=shape, file=sys.stderr, **bar_size())
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, begun: list[Running]) -> None:
        """Show the present state."""
        over = sum(running.over for running in begun)
        if self._bar is not None:
            self._bar.n = sum(len(r.trial.scores) - r.trial.scores.count(None) + len(r.trial.errors) for r in begun)
            self._bar.set_postfix_str(self.line(begun))
        elif self._progress and over > self._printed:
            print(f"tune: {self.line(begun)}", file=sys.stderr, flush=True)
        self._printed = over

    def print_lost(self, trial: Trial, fold: int) -> None:
        """Print one line with the reason why a fold has no result; the search's result has the whole error."""
        if self._progress:
            lines = trial.errors[fold].strip().splitlines()
            first = lines[0] if lines and lines[0].startswith("The fold") else (lines or [""])[-1]
            text = f"tune: fold {fold} of trial {trial.number} failed: {first}"
            if self._bar is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self._bar.write(text, file=sys.stderr)

    def line(self, begun: list[Running]) -> str:
        """Return the present state in one line."""
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
