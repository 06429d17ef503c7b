"""The distribution: its name on the package index, its extras, and the error if an extra is not installed.

The import name is ``trainloop``; the distribution is ``tt-trainloop``, because ``trainloop`` on the index is another
project's package.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from trainloop.errors import ConfigurationError

NAME = "tt-trainloop"
REINSTALL = f"Uninstall both, then install this one again: pip uninstall -y trainloop {NAME}; pip install {NAME}."
FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Folder that contains the package: a source folder or an entry of ``sys.path``."""


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, from the source folder if this package runs from there."""
    try:
        with open(os.path.join(FOLDER, "setup.cfg"), encoding="utf-8") as file:
            from_source = f"name = {NAME}\n" in file.read()
    except OSError:
        from_source = False
    return f"pip install '{'.' if from_source else NAME}[{extra}]'"  # zsh expands brackets without quotes


def import_extra(module: str, owner: str, extra: str) -> Any:
    """Import a module that an extra installs; if it is missing, raise an error that names ``owner`` and the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0].replace("sklearn", "scikit-learn")
        raise ConfigurationError(f"{owner} needs {name}: {pip_install(extra)}.") from error
