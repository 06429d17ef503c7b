"""README, the picture and the guides show what the pages of benchmarks say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import pages, picture, readme

ROOT = Path(__file__).parent.parent.parent
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "benchmarks").glob("*.rst"))}
# Pages that benchmarks/pages.py does not write: several commands measure for them, or nothing has been measured.
OF_SEVERAL_RUNS = {"GPU", "SOAK", "SURVIVAL", "TABULAR"}


def paragraphs_with_pages() -> list[tuple[str, str, list[str]]]:
    """Each paragraph of README and the guides that names a page of results: its file, its text and these pages."""
    found = []
    for path in [ROOT / "README.rst", *sorted((ROOT / "docs").glob("guides/*.rst"))]:
        text = path.read_text()
        if path.name == "README.rst":
            text = text.replace(readme.block_of(text), "")  # it is compared as a whole
        for paragraph in re.split(r"\n\s*\n", text):
            named = re.findall(r"benchmarks/([A-Z]+)\.rst", paragraph)
            if named:
                found.append((path.name, paragraph, named))
    return found


def test_readme_has_the_figures_of_the_pages() -> None:
    text = (ROOT / "README.rst").read_text()
    assert readme.block_of(text) == readme.written(PAGES["RESULTS"], PAGES["STARTING"]), "python -m benchmarks.readme"


def test_the_picture_is_of_the_page() -> None:
    assert picture.PICTURE.read_text() == picture.drawn(PAGES["RESULTS"]), "python -m benchmarks.picture"


def test_paragraphs_that_name_a_page_have_its_figures() -> None:
    paragraphs = paragraphs_with_pages()
    assert len(paragraphs) >= 5
    for name, paragraph, named in paragraphs:
        for figure in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", paragraph):
            assert any(figure in PAGES[page] for page in named), f"{name}: {figure} is not in {named}: {paragraph}"


@pytest.mark.parametrize("name", sorted(PAGES.keys() - OF_SEVERAL_RUNS))
def test_a_page_is_of_one_commit(name: str) -> None:
    text = PAGES[name]
    assert len(pages.commits_of(text)) == 1
    assert re.search(r"^\* .*\btorch \d", text, re.MULTILINE)
    assert text.count("wrote this page") == 1


def test_a_page_that_an_edit_has_changed_is_noticed() -> None:
    """The comparison sees a figure that is not on the page."""
    page = PAGES["RESULTS"].replace(pages.PRELIMINARY, "")
    shown = readme.written(page, PAGES["STARTING"])
    ratio = dict(picture.tables(page)["MLP, in memory"])["trainloop"]
    assert f" {ratio:.2f} " in shown
    changed = re.sub(rf"(?m)^(trainloop +\d+\.\d +){ratio:.2f} ", r"\g<1>9.99 ", page, count=1)
    assert changed != page
    assert readme.written(changed, PAGES["STARTING"]) != shown


def test_readme_shows_no_preliminary_figures() -> None:
    page = PAGES["RESULTS"].replace(pages.PRELIMINARY, "") + pages.PRELIMINARY
    assert not re.search(r"\d\.\d\d", readme.written(page, PAGES["STARTING"]))


def test_a_tiny_run_keeps_the_pages() -> None:
    with pytest.raises(SystemExit, match="its figures mean nothing"):
        bench.main(["--tiny"])
