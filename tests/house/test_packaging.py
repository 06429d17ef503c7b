"""The package's metadata: its name, one version, extras that the README explains, classifiers that were tried."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import importlib.util
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from kit.places import ROOT

import trainloop
from trainloop._support import distribution
from trainloop.doctor import probe

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
OF_THE_PROJECT = {"test", "test-all", "test-ecosystem", "test-ecosystem-part", "lint", "docs", "bench"}


def test_the_version_is_in_one_place() -> None:
    assert SETUP["metadata"]["version"] == "attr: trainloop.__version__"
    assert version("tt-trainloop") == trainloop.__version__
    # Tools that read it run no Python.
    assert f"\nversion: {trainloop.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_explains_every_extra() -> None:
    table = (ROOT / "README.rst").read_text().partition("extra  ")[2].partition("A feature whose")[0]
    assert set(re.findall(r"``([a-z]+)``", table)) == set(SETUP["options.extras_require"]) - OF_THE_PROJECT
    assert set(probe.OF_THE_PROJECT) == OF_THE_PROJECT
    for_users = set(probe.missing_of_extras(importlib.metadata.requires("tt-trainloop") or ()))
    assert for_users == set(SETUP["options.extras_require"]) - OF_THE_PROJECT


def test_ci_tries_the_oldest_and_the_newest_python() -> None:
    said = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    tried = re.findall(r'"(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert SETUP["options"]["python_requires"] == f">={said[0]}"
    assert {said[0], said[-1]} <= set(tried) <= set(said)


def test_classifiers_are_the_versions_that_the_readme_reports() -> None:
    said = set(re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"]))
    reported = (ROOT / "README.rst").read_text().partition("\nInstalling\n")[2].partition("The core needs")[0]
    assert said == set(re.findall(r"^(3\.\d+) ", reported, re.MULTILINE))


# -- a name that is taken: `trainloop` on PyPI is another project's ----------------------------------------------------


def test_hints_name_this_projects_distribution_and_quote_the_extra() -> None:
    """A shell such as zsh expands brackets without quotes; `pip install trainloop` replaces this package by another."""
    assert SETUP["metadata"]["name"] == distribution.NAME
    extras = set(SETUP["options.extras_require"])
    texts = [*ROOT.glob("*.rst"), *(ROOT / "docs").rglob("*.rst"), *(ROOT / "trainloop").rglob("*.py")]
    found = []
    for path in texts:
        text = path.read_text()
        for line in text.splitlines():
            assert not re.search(r"pip install (-\S+ )*'?trainloop\b", line), (path, line)
            assert not re.search(r"pip install (-\S+ )*[\w.-]+\[", line), (path, line)
        found += re.findall(r"(?<![\w.])(tt-)?trainloop\[([a-z]\w*)\]", text)
        found += [("tt-", extra) for extra in re.findall(r"pip install '\.\[([a-z]\w*)\]'", text)]  # in a clone
    assert len(found) > 8
    assert {ours for ours, _ in found} == {"tt-"}
    assert {extra for _, extra in found} <= extras
    own = [name for need in SETUP["options.extras_require"].values() for name in re.findall(r"(\S*trainloop)\[", need)]
    assert set(own) == {distribution.NAME}


def test_one_place_has_the_name_for_errors() -> None:
    for path in (ROOT / "trainloop").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert "trainloop[" not in node.value, f"{path}:{node.lineno}: use distribution.pip_install"
                if path.name != "distribution.py":
                    assert distribution.NAME not in node.value, f"{path}:{node.lineno}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pip_install":
                extra = node.args[0]
                assert not isinstance(extra, ast.Constant) or extra.value in SETUP["options.extras_require"], path


def test_the_hint_is_for_the_source_folder_or_for_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distribution.pip_install("plot") == "pip install '.[plot]'"
    monkeypatch.setattr(distribution, "FOLDER", str(tmp_path))
    assert distribution.pip_install("plot") == "pip install 'tt-trainloop[plot]'"
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = another\n")
    assert distribution.pip_install("plot") == "pip install 'tt-trainloop[plot]'"


def other_project(site: Path) -> None:
    """Install a distribution `trainloop` 0.11.0 into a folder, over what is there."""
    info = site / "trainloop-0.11.0.dist-info"
    info.mkdir(parents=True)
    (site / "trainloop").mkdir()
    (site / "trainloop" / "__init__.py").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trainloop\nVersion: 0.11.0\n")
    (info / "RECORD").write_text("trainloop/__init__.py,,\ntrainloop-0.11.0.dist-info/METADATA,,\n")


def test_another_distribution_of_this_import_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert probe.other_distribution() == ""
    other_project(tmp_path)
    importlib.invalidate_caches()
    assert probe.other_distribution() == f"trainloop 0.11.0 in {tmp_path}"
