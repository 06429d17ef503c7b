"""Every Python block of the documentation and the README runs, in the order it stands on its page.

A page's blocks share their names; a guide begins with those of the first page (``model``, ``train_loader``, ...).
Beside ``.. code-block:: python`` there are two marks, both comments that a reader of the built page does not see::

    .. setup:                      code that runs, and is not shown


    .. not run: needs two hosts    the block below is compiled only, and this says why
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
import sys
import textwrap
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from kit.places import ROOT
from torch import nn
from torch.utils.data import DataLoader

import conftest
import trainloop
import trainloop.callbacks
import trainloop.pretrained
import trainloop.schedulers
import trainloop.tabular
import trainloop.tuning
from benchmarks import picture
from trainloop.errors import TrainLoopError

PAGES = [ROOT / "README.rst", *sorted((ROOT / "docs").rglob("*.rst"))]
LANGUAGES = {"python", "shell", "text", "pytb", "ini"}

_MARK = re.compile(r"^(?P<indent> *)\.\. (?:code-block:: (?P<language>\S+)|(?P<setup>setup:)|not run: (?P<reason>.+))$")


@dataclass(frozen=True)
class Block:
    """A piece of code on a page."""

    code: str
    line: int
    """Line of the page on which the code begins, counted from 1."""
    language: str
    reason_not_run: str | None


def blocks_of(page: Path) -> list[Block]:
    """All code blocks of a page, in order."""
    lines = page.read_text().splitlines()
    found: list[Block] = []
    reason: str | None = None
    at = 0
    while at < len(lines):
        mark = _MARK.match(lines[at])
        at += 1
        if mark is None:
            continue
        if mark["reason"]:
            reason = mark["reason"]
            continue
        indent = len(mark["indent"])
        while at < len(lines) and (not lines[at].strip() or re.match(rf" {{{indent + 1},}}:[\w-]+:", lines[at])):
            at += 1
        begin = at
        while at < len(lines) and (not lines[at].strip() or len(lines[at]) - len(lines[at].lstrip()) > indent):
            at += 1
        code = textwrap.dedent("\n".join(lines[begin:at])).rstrip() + "\n"
        found.append(Block(code, begin + 1, "python" if mark["setup"] else mark["language"], reason))
        reason = None
    return found


def run(page: Path, blocks: list[Block], names: dict[str, Any]) -> None:
    """Run blocks one after another in ``names``; a traceback shows the page and its line."""
    for block in blocks:
        if block.language == "python":
            compiled = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            if block.reason_not_run is None:
                exec(compiled, names)


def names_of_the_first_page() -> dict[str, Any]:
    """What ``index.rst`` defines, with a single epoch in one process."""
    names: dict[str, Any] = {"__name__": "__main__"}
    page = ROOT / "docs" / "index.rst"
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    run(page, blocks[:2], names)  # data and model
    setup = blocks[2].code.partition("tl = TrainLoop")[0]
    exec(setup, names)
    return names


def with_python(page: Path) -> bool:
    return any(block.language == "python" for block in blocks_of(page))


# make test-docs, and so CI, runs all pages. Slow are searches with dozens of models.
MARKS = {
    "guides/tuning.rst": pytest.mark.slow,
    "guides/tabular.rst": pytest.mark.slow,
    "guides/preparing_code.rst": pytest.mark.long,
    "guides/many_devices.rst": pytest.mark.long,
    "guides/runs_that_survive.rst": pytest.mark.long,
    "guides/cross_validation.rst": pytest.mark.long,
    "guides/larger_than_a_device.rst": pytest.mark.long,
    "migrating/accelerate.rst": pytest.mark.long,
    "migrating/aitoolbox.rst": pytest.mark.long,
    "migrating/lightning.rst": pytest.mark.long,
    "migrating/plain_ddp.rst": pytest.mark.long,
}


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    return [mark for name, mark in MARKS.items() if page.match(name)]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks_of(page)) for page in PAGES if with_python(page)],
)
@pytest.mark.filterwarnings("ignore:num_gpus=0. training on the CPU")
def test_code_of_a_page_runs(page: Path, folder: Path, may_leave: Any) -> None:
    may_leave("/mpl-data/fonts/")  # matplotlib keeps its fonts open
    standalone = page.name in ("README.rst", "index.rst")
    names = {"__name__": "__main__"} if standalone else names_of_the_first_page()
    run(page, blocks_of(page), names)


def test_ten_minutes_are_one_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The blocks of the first page, pasted one after another into a file, which is run as a script."""
    section = (ROOT / "docs" / "index.rst").read_text().partition("All snippets of the guides")[0]
    (folder / "page.rst").write_text(section)
    blocks = [block.code for block in blocks_of(folder / "page.rst") if block.language == "python"]
    (folder / "ten_minutes.py").write_text("\n".join(blocks))
    names = runpy.run_path(str(folder / "ten_minutes.py"), run_name="__main__")
    out = capfd.readouterr().out
    assert out.count("accuracy") == 1
    assert "TrainLoop(ddp on 2 x cpu" in out
    assert names["tl"].epoch == 1


def test_the_examples_of_one_device_learn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer moves, and what is fitted for several epochs gets better, in all its parts."""
    judged: list[tuple[str, float, dict[str, list[float]]]] = []
    fit = trainloop.TrainLoop.fit

    def watched(loop: trainloop.TrainLoop, *args: Any, **kwargs: Any) -> Any:
        before = {name: p.detach().clone() for name, p in loop.model.named_parameters() if p.ndim > 1}
        epochs = loop.epoch
        result = fit(loop, *args, **kwargs)
        now = dict(loop.model.named_parameters())
        moved = {name: float((now[name] - p).detach().abs().max()) for name, p in before.items()}
        losses = {name: loop.history[name][epochs:] for name in loop.history if name.startswith("loss")}
        judged.append((type(loop.model).__name__, min(moved.values()), losses))
        return result

    monkeypatch.setattr(trainloop.TrainLoop, "fit", watched)
    for guide in ("one_device", "losses_and_optimizers"):
        page = ROOT / "docs" / "guides" / f"{guide}.rst"
        run(page, blocks_of(page), names_of_the_first_page())
    for name, least, losses in judged:
        assert least > 1e-3, (name, least)
        for values in losses.values():
            if len(values) >= 4:
                assert values[-1] < 0.75 * values[0], (name, losses)
    assert {"Net", "Drawing"} <= {name for name, _, losses in judged if len(losses["loss"]) >= 4}


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"^\.\. code::", text, re.MULTILINE), f"{page}: write code-block:: with a language"
        for block in blocks_of(page):
            assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language}"


def test_blocks_are_found_with_their_lines_and_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.rst"
    page.write_text(
        textwrap.dedent(
            """
            Title
            =====

            .. setup:

                a = 1

            .. code-block:: python
               :caption: shown

                b = a + 1

                c = b

            .. not run: needs a cluster
            .. code-block:: python

                raise RuntimeError

            .. code-block:: shell

                make test
            """
        )
    )
    blocks = blocks_of(page)
    assert [(b.code, b.line, b.language, b.reason_not_run) for b in blocks] == [
        ("a = 1\n", 7, "python", None),
        ("b = a + 1\n\nc = b\n", 12, "python", None),
        ("raise RuntimeError\n", 19, "python", "needs a cluster"),
        ("make test\n", 23, "shell", None),
    ]
    names: dict[str, Any] = {}
    run(page, blocks, names)
    assert names["c"] == 2


# -- the page of errors ------------------------------------------------------------------------------------------------

sys.path.insert(0, str(ROOT / "docs"))
import elsewhere  # noqa: E402
import make_errors  # noqa: E402

MADE_HERE = [mistake for mistake in make_errors.MISTAKES if "ddp" not in mistake.code and "NaN" not in mistake.code]


@pytest.mark.parametrize("mistake", MADE_HERE, ids=lambda mistake: mistake.title)
def test_the_page_of_errors_shows_what_is_said(mistake: make_errors.Mistake, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(TrainLoopError) as caught:
        exec(make_errors.BEGIN + textwrap.dedent(mistake.definitions) + textwrap.dedent(mistake.code), names)
    said = f"{type(caught.value).__name__}: {caught.value}".replace(str(folder), "/home/you")
    page = (ROOT / "docs" / "errors.rst").read_text()
    assert textwrap.indent(said, "    ") in page, (
        f"write the page anew, by docs/make_errors.py; now it is said:\n{said}"
    )


# Those that end ranks or need a script, and one of the others: what a script prints is what is raised.
MADE_BY_SCRIPTS = [mistake for mistake in make_errors.MISTAKES if mistake not in MADE_HERE[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MADE_BY_SCRIPTS, ids=lambda mistake: mistake.title)
def test_the_page_of_errors_is_what_its_script_makes(mistake: make_errors.Mistake) -> None:
    assert make_errors.shown(mistake) in (ROOT / "docs" / "errors.rst").read_text()


def test_the_page_of_errors_has_each_mistake_once() -> None:
    titles = re.findall(r"^(.+)\n-+$", (ROOT / "docs" / "errors.rst").read_text(), re.MULTILINE)
    assert titles == [mistake.title for mistake in make_errors.MISTAKES]


# -- docstrings --------------------------------------------------------------------------------------------------------

# Old paths, which only warn and pass names on.
MOVED = {f"trainloop.train_loop.{name}" for name in ("preflight", "replay", "restarts", "timings")}
MODULES = ["trainloop", *(found.name for found in pkgutil.walk_packages(trainloop.__path__, "trainloop."))]
MODULES = [name for name in MODULES if name not in MOVED]


# Modules whose examples need packages that are extras.
NEEDS = {"trainloop.callbacks.reports.trackers": ["wandb", "mlflow"]}


# Examples that show what a run of somebody's own prints: its numbers, its date.
NOT_COMPARED = {
    "trainloop.callbacks.weights.gradient.GradientStats",
    "trainloop.callbacks.reports.tensorboard.TensorBoard",
    "trainloop.callbacks.weights.train_schedule.LearningRateMonitor",
}
# And those that need a training that fails, or one that has been.
NOT_RUN = {
    "trainloop.callbacks.watch.nan.NonFinite",
    "trainloop.callbacks.watch.nan.TerminateOnNaN",
}


class _WhereShown(doctest.OutputChecker):
    """Compare output only where the example shows some: most call ``fit``, and show nothing."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def names_of_docstrings() -> dict[str, Any]:
    """What examples in docstrings may use beside their own module: a loop over sixteen rows, and all callbacks."""
    from trainloop import callbacks, result_package, schedulers

    names = dict(vars(torch.optim.lr_scheduler))
    names |= {name: getattr(home, name) for home in (schedulers, callbacks, result_package) for name in home.__all__}
    names |= {"torch": torch, "nn": nn, "DataLoader": DataLoader, "TrainLoop": trainloop.TrainLoop}
    model, data = Net(), conftest.make_data(80, features=4, classes=2)
    loader = DataLoader(data, batch_size=8)
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    names |= {"model": model, "optimizer": optimizer, "criterion": criterion, "device": torch.device("cpu")}
    names |= {"train_loader": loader, "val_loader": loader, "test_loader": loader, "loader": loader}
    names |= {"make_train_loader": make_train_loader}
    names["tl"] = SilentLoop(model, loader, loader, loader, optimizer, criterion, accelerator="cpu", progress_bar=False)
    return names


class SilentLoop(trainloop.TrainLoop):
    """Its ``fit`` returns nothing, so that an example needn't show a model's text, and takes three epochs at most."""

    def fit(self, num_epochs: int = 0, *args: Any, **kwargs: Any) -> Any:
        super().fit(min(num_epochs, 3), *args, **kwargs)


class Net(trainloop.TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.log("accuracy", 1.0)
        return super().get_loss(batch_data, criterion, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def make_train_loader(*_: Any) -> DataLoader[Any]:
    return DataLoader(conftest.make_data(16, features=4, classes=2), batch_size=8)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str, folder: Path, may_leave: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))  # for what is saved under ~/
    may_leave("/mpl-data/fonts/")  # matplotlib keeps its fonts open
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    module = importlib.import_module(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"tmp_path": folder})
    runner = doctest.DocTestRunner(_WhereShown(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for case in found:
        if not case.examples or case.name in NOT_RUN:
            continue
        if case.name in NOT_COMPARED:
            for example in case.examples:
                example.want = ""
        case.globs = {**names_of_docstrings(), **case.globs}
        runner.run(case)
    result = runner.summarize(verbose=False)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name} fail; see above"


DOCUMENTED = sorted(
    {
        name
        for page in (ROOT / "docs" / "api").glob("*.rst")
        for name in re.findall(r"automodule:: (\S+)", page.read_text())
    }
)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, name
    missing = []
    for public in module.__all__:
        item = getattr(module, public)
        if not callable(item):
            continue
        if not item.__doc__:
            missing.append(public)
        for member, value in vars(item).items() if isinstance(item, type) else ():
            if not member.startswith("_") and callable(value) and not inspect.getdoc(getattr(item, member)):
                missing.append(f"{public}.{member}")  # getdoc looks at the classes above, too
    assert not missing, missing


# -- links -------------------------------------------------------------------------------------------------------------

GUIDES = [ROOT / "docs" / "index.rst", *(page for page in PAGES if page.parent.name in ("guides", "migrating"))]


def prose_of(page: Path) -> str:
    """A page without its code, its titles, and what tables say of other libraries."""
    lines = page.read_text().splitlines()
    kept = []
    code_of: int | None = None  # the indent of the mark whose block this is
    there = False
    for line, below in zip(lines, [*lines[1:], ""]):
        indent = len(line) - len(line.lstrip())
        if code_of is not None and line.strip() and indent <= code_of:
            code_of = None
        if code_of is None and (_MARK.match(line) or re.match(r" *\.\. (image|math)::|.*[^:]::$", line)):
            code_of = indent
        if page.parent.name == "migrating" and page.stem != "plain_ddp":  # on that page both columns are torch's
            there = line.startswith("   * - ") or (there and line.startswith("       "))
            line = re.sub("^``[^`]+``(, ``[^`]+``)*", "", line)  # in a row of a simple table
        if code_of is None and not there and not re.match(r"[=~-]{3,}$", below):
            kept.append(line)
    return "\n".join(kept)


def names_that_are_pages() -> set[str]:
    """How guides write what has a place in the API's pages, or in those of PyTorch, Python and NumPy."""
    parts = [
        trainloop,
        trainloop.callbacks,
        trainloop.schedulers,
        trainloop.errors,
        trainloop.tabular,
        trainloop.pretrained,
        trainloop.tuning,
    ]
    names = {name for part in parts for name in part.__all__ if name[0].isupper()}
    names |= {name for name in vars(trainloop.AbstractCallback) if name.startswith("on_")}
    names |= {"fit", "get_loss", "get_loss_eval", "get_predictions", "self.log", "self.device", "self.all_gather"}
    loop = [name for name in dir(trainloop.TrainLoop) if not name.startswith("_")]
    names |= {f"{tl}.{name}" for tl in ("tl", "TrainLoop", "self.train_loop_obj") for name in loop}
    pages = [name for project in elsewhere.SITES for name in elsewhere.addresses(project) if "." in name]
    return names | set(pages) | {name.rpartition(".")[2] for name in pages if name.rpartition(".")[2][0].isupper()}


def test_names_in_a_guide_are_links() -> None:
    """``ModelCheckpoint`` is a word, `.ModelCheckpoint` a link to its page. `make docs` finds links to nowhere."""
    names = names_that_are_pages() - {"Module", "Generator", "Parameter", "Tensor", "Optimizer", "Path"}
    linked, plain = 0, []
    for page in GUIDES:
        text = prose_of(page)
        for literal in re.findall(r"(?<!`)``([^`]+)``(?!`)", text):
            word = re.match(r"(?:with )?([\w.]+)(?:\(.*\))?:?$", " ".join(literal.split()))
            if word is not None and word[1] in names:
                plain.append((page.name, literal))
        linked += len(re.findall(r"(?<![`:\w])`[^`]+`(?![`_])|:(?:class|func|meth|mod|doc):`", text))
    assert not plain, f"write them as links, `name <.Class.name>`: {plain}"
    assert linked > 300


def test_links_to_other_projects_name_what_is_there(folder: Path) -> None:
    """Each name of the tables exists, once; what is written of them is an inventory as Sphinx reads it."""
    for project, (site, path) in elsewhere.write(folder).items():
        assert re.fullmatch("https://.*/", site)
        *head, packed = Path(path).read_bytes().split(b"\n", 4)
        assert (head[0], head[3][-5:]) == (b"# Sphinx inventory version 2", b"zlib.")
        rows = [row.split(" ") for row in zlib.decompress(packed).decode().splitlines()]
        assert {row[0] for row in rows} == set(elsewhere.addresses(project))
        for row in rows:
            assert re.fullmatch(r"[\w.]+ py:[a-z]+ 1 [\w./]+\.html#[\w.-]+ -", " ".join(row))
        names = [name for names in elsewhere.PAGES[project].values() for name in names.split()]
        assert len(names) == len(set(names))


WIDTH = 92  # characters of code in the column of the theme


def test_no_code_is_wider_than_its_column() -> None:
    for page in GUIDES:
        for block in blocks_of(page):
            if block.language in ("python", "shell"):
                wide = [line for line in block.code.splitlines() if len(line) > WIDTH]
                assert not wide, f"{page}:{block.line}: what is cut off may be the point: {wide}"


# -- the picture of the README -----------------------------------------------------------------------------------------


def test_the_picture_shows_what_was_measured() -> None:
    """It is what its script draws from the results: each loop of its tables, with the ratio that stands there."""
    results, shown = picture.RESULTS.read_text(), picture.PICTURE.read_text()
    assert shown == picture.drawn(results), "draw it anew: python -m benchmarks.picture"
    texts = [element.text for element in ElementTree.fromstring(shown).iter("{http://www.w3.org/2000/svg}text")]
    for title in picture.SHOWN:
        table = results.partition(f"\n{title}\n~")[2].partition("\n~")[0]
        for loop, ratio in picture.tables(results)[title]:
            row = next(line for line in table.splitlines() if line.startswith(f"{loop} "))
            assert f" {ratio:.2f} " in row
            if loop != picture.BASE and not loop.startswith(picture.FLOORS):
                assert (texts[texts.index(loop) + 1] or "").startswith(f"{ratio:.2f}") or texts.count(loop) > 1
    assert str(picture.PICTURE.relative_to(ROOT)) in (ROOT / "README.rst").read_text()


def test_pictures_name_what_there_is() -> None:
    """A method that has been renamed is renamed in the pictures."""
    source = "\n".join(path.read_text() for path in (ROOT / "trainloop").rglob("*.py"))
    others = {"zero_grad", "collate_fn", "all_reduce", "add_scalar", "val_loss"}
    for drawn in sorted((ROOT / "docs" / "_static").glob("*.svg")):
        texts = " ".join(re.findall(r"<text[^>]*>([^<]*)<", drawn.read_text()))
        names = set(re.findall(r"(?<![\w.])_?[a-z]+(?:_[a-z]+)+\b", texts)) - others
        missing = {name for name in names if not re.search(rf"\bdef {name}\b|\b{name}\b *[:=]", source)}
        assert missing == set(), drawn.name
