"""Check the machine and the installation before a training: ``python -m trainloop doctor``.

* :func:`examine`: every check, as a :class:`Report` that prints as a table, ``ok``, ``attention`` or ``problem`` a line
* ``checks.py``: the checks, each a decision over readings
* ``probe.py``: the readings; libraries are imported in processes of their own
* ``cuda_libraries.py``: which package a CUDA library that can't be loaded comes from

Nothing here imports torch: it must work where torch can't be imported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from trainloop.doctor import checks, probe
from trainloop.doctor.checks import Check

__all__ = ["Check", "Report", "examine"]


@dataclass(frozen=True)
class Report:
    """All checks; ``print`` shows them as a table."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True if no check found a problem; ``attention`` is none."""
        return all(check.status != "problem" for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def to_json(self) -> str:
        """As JSON for programs: ``{"ok": bool, "checks": [{"name", "status", "found", "remedy"}, ...]}``."""
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
    """Check the machine and the installation, in some seconds; changes nothing.

    Parameters
    ----------
    readings : Readings, optional
        Used in place of this machine's.
    """
    readings = probe.read() if readings is None else readings
    return Report(tuple(found for check in checks.CHECKS for found in check(readings)))
