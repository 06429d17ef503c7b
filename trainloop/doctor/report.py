"""Run all checks of the doctor, and show what each of them found, with its remedy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from trainloop.doctor import checks, probe
from trainloop.doctor.checks import Check


@dataclass(frozen=True)
class Report:
    """Results of all checks. ``print`` shows them as a table."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True if no check has the status ``problem``. The status ``attention`` is allowed."""
        return all(check.status != "problem" for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def to_json(self) -> str:
        """Return JSON for programs: ``{"ok": bool, "checks": [{"name", "status", "found", "remedy"}, ...]}``."""
        return json.dumps({"ok": self.ok, "checks": [asdict(check) for check in self.checks]}, indent=2)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.status.ljust(9)}  {check.name.ljust(width)}  {check.found}")
            if check.remedy:
                lines.append(f"{' ' * (width + 11)}  -> {check.remedy}")
        counts = {status: sum(check.status == status for check in self.checks) for status in ("problem", "attention")}
        lines.append(", ".join(f"{status}: {count}" for status, count in counts.items()))
        return "\n".join(lines)

    __repr__ = __str__


def examine(readings: probe.Readings | None = None) -> Report:
    """Check the machine and the installation in a few seconds. Nothing is changed.

    Parameters
    ----------
    readings : Readings, optional
        Values to check. Default: values read from this machine.
    """
    readings = probe.read() if readings is None else readings
    return Report(tuple(found for check in checks.CHECKS for found in check(readings)))
