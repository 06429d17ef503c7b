"""The package's metadata: one version, extras that the README explains, classifiers that CI tries."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import version

import trainloop
from places import ROOT

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
OF_THE_PROJECT = {"test", "test-all", "test-ecosystem", "lint", "docs", "bench"}


def test_the_version_is_in_one_place() -> None:
    assert SETUP["metadata"]["version"] == "attr: trainloop.__version__"
    assert version("trainloop") == trainloop.__version__
    # Tools that read it run no Python.
    assert f"\nversion: {trainloop.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_explains_every_extra() -> None:
    table = (ROOT / "README.rst").read_text().partition("extra  ")[2].partition("A feature whose")[0]
    assert set(re.findall(r"``([a-z]+)``", table)) == set(SETUP["options.extras_require"]) - OF_THE_PROJECT


def test_ci_tries_the_oldest_and_the_newest_python() -> None:
    said = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    tried = re.findall(r'"(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert SETUP["options"]["python_requires"] == f">={said[0]}"
    assert {said[0], said[-1]} <= set(tried) <= set(said)
