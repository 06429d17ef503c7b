"""``docs/api`` lists what is public: the names in ``__all__`` of the modules without an underscore, and no others."""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType

import pytest
from kit.places import ROOT

import trainloop

PAGES = sorted((ROOT / "docs" / "api").glob("*.rst"))


def listed() -> dict[str, str]:
    """Return the names on the API pages, as ``module.name``, with their pages."""
    found = {}
    for page in PAGES:
        module, whole = "", False
        lines = page.read_text().splitlines()
        for i, line in enumerate(lines):
            if match := re.match(r"\.\. (?:automodule|currentmodule):: ([\w.]+)$", line):
                module = match[1]
                whole = "automodule" in line and ":no-members:" not in "".join(lines[i + 1 : i + 2])
                if whole:
                    found.update({f"{module}.{name}": page.name for name in importlib.import_module(module).__all__})
            elif match := re.match(r"\.\. auto(?:class|function|data):: ([\w.]+)$", line):
                name = match[1] if "." in match[1] else f"{module}.{match[1]}"
                found[name] = page.name
            elif module and (match := re.match(r"   (\w+)$", line)):  # of an autosummary
                found[f"{module}.{match[1]}"] = page.name
    return found


def modules() -> list[ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(trainloop.__path__)]
    return [importlib.import_module(f"trainloop.{name}") for name in names if not name.startswith("_")]


def test_what_is_public_is_listed() -> None:
    on_pages = {id(value) for value in map(found, listed())}
    missing = [
        f"{module.__name__}.{name}"
        for module in [trainloop, *modules()]
        for name in module.__all__
        if id(getattr(module, name)) not in on_pages
    ]
    assert missing == []


@pytest.mark.parametrize("name", listed())
def test_what_is_listed_is_public(name: str) -> None:
    module, _, own = name.rpartition(".")
    home = importlib.import_module(module)
    assert own in home.__all__
    assert not any(part.startswith("_") for part in name.split("."))


def found(name: str) -> object:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)
