"""Check the machine and the installation before you train: ``python -m trainloop doctor``.

:func:`examine` runs all checks and returns a :class:`Report`. ``print`` shows it as a table of lines with the status
``ok``, ``attention`` or ``problem``. All of this works even if torch can't be imported.
"""

from __future__ import annotations

from trainloop.doctor.checks import Check
from trainloop.doctor.report import Report, examine

__all__ = ["Check", "Report", "examine"]
