"""Every example runs as it stands, as a user would run it, and prints what it promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kit.places import ROOT

EXAMPLES = ROOT / "examples"

# What to pass, and what must be printed. The first group, where there is one, is a share that must be reached.
SCRIPTS: dict[str, tuple[list[str], str, float]] = {
    "single_training.py": (["--epochs", "4"], r"test accuracy: ([\d.]+)%", 90),
    "dp_training.py": (["--epochs", "4"], r"test accuracy: ([\d.]+)%", 90),
    "ddp_training.py": (["--epochs", "4"], r"test accuracy: ([\d.]+)%", 90),
    "fsdp_training.py": (["--epochs", "4"], r"test accuracy: ([\d.]+)%", 75),
    "amp_training.py": (["--epochs", "2"], r"test accuracy: ([\d.]+)%", 75),
    "plain_pytorch.py": (["--epochs", "4"], r"test accuracy: ([\d.]+)%", 90),
    "wrappers_standalone.py": (["--epochs", "4"], r"accuracy[^\d]*([\d.]+)%", 90),
    "tabular.py": (["--epochs", "40"], r"R2 on 71 held-out patients: 0\.(\d\d)", 25),
    "text_transformer.py": (["--epochs", "3"], r"next letter on \d+ held-out lines: ([\d.]+)%", 25),
    "carried_state.py": (["--epochs", "6"], r"held-out letters: ([\d.]+)% right", 20),
    "gan.py": (["--epochs", "3"], r"discriminator thinks real: (\d+)%", 0),
    "custom_callback.py": (["--epochs", "2"], r"2 epochs were timed", 0),
    "custom_sampler.py": (["--epochs", "5"], r"test accuracy: ([\d.]+)%", 70),
    "huggingface_style.py": (["--epochs", "4"], r"test accuracy: ([\d.]+)%", 85),
    "resume_after_kill.py": ([], r"(?i)resum|identical", 0),
    "debug_failed_step.py": ([], r"the replay raises it again(?s:.*)the replay found SqrtBackward0", 0),
    "tabular_predictor.py": (["--models", "LR", "GBM"], r"right on ([\d.]+)% of 142 held-out patients", 90),
    "tabular_multimodal.py": (["--rows", "600"], r"right on ([\d.]+)% of 200 held-out digits", 55),
    "tuning_bagging.py": ([], r"\n +1 +LightGBM +0\.\d+(?s:.*)is right on (\d+)", 90),
}
# In the default run: what the README promises. CI runs all (make test-docs).
QUICK = ("ddp_training.py",)
# Run by a test of their own below, or imported by the others.
OTHERS = {"digits.py", "torchrun.sh", "two_hosts.py", "two_hosts.sh", "notebook.ipynb"}


def environment() -> Mapping[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def run(command: list[str], folder: Path) -> str:
    """Run in an empty folder; a failure shows all that was printed."""
    process = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:]
    return process.stdout


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in QUICK else pytest.mark.slow) for name in SCRIPTS],
)
def test_example(name: str, tmp_path: Path) -> None:
    if not (EXAMPLES / name).exists():
        pytest.fail(f"examples/{name} is promised and missing")
    arguments, promised, at_least = SCRIPTS[name]
    output = run([sys.executable, str(EXAMPLES / name), *arguments], tmp_path)
    found = re.search(promised, output)
    assert found, f"{promised!r} not in:\n{output[-3000:]}"
    if found.groups():
        assert float(found[1]) >= at_least, found[0]
    logs = re.search(r"TensorBoard logs: +(\S+)", output)
    if logs:
        files = [path for path in (tmp_path / logs[1]).rglob("*tfevents*") if path.stat().st_size > 100]
        assert files, f"no TensorBoard events in {logs[1]}"


def test_all_examples_are_run() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert names <= set(SCRIPTS) | OTHERS, sorted(names - set(SCRIPTS) - OTHERS)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 120
    assert text.startswith('"""')


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    copy = shutil.copytree(EXAMPLES, tmp_path / "examples")
    output = run(["bash", str(copy / "torchrun.sh"), "--epochs", "2"], tmp_path)
    assert output.count("test accuracy") == 1, output  # two processes, one of which speaks


@pytest.mark.hosts
def test_two_hosts(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    copy = shutil.copytree(EXAMPLES, tmp_path / "examples")
    output = run(["bash", str(copy / "two_hosts.sh"), "--epochs", "2"], tmp_path)
    checksums = re.findall(r"node \d: trained, checksum of the weights ([\d.]+)", output)  # a line end may come late
    assert len(checksums) == 2, output
    assert checksums[0] == checksums[1], output
    assert "test accuracy" in output


EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def executed(notebook: Path, folder: Path) -> Any:
    """A notebook after a real kernel has run it; the client, which leaves threads, in a process of its own."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    # The kernel's command is looked up by name; a private data folder makes it this very interpreter.
    kernels = folder / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "Python 3"}
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    script = folder / "execute.py"
    script.write_text(f"import os\nos.environ['JUPYTER_PATH'] = {str(folder / 'jupyter')!r}\n{EXECUTE}")
    run([sys.executable, str(script), str(notebook), str(folder / "executed.ipynb")], folder)
    return nbformat.read(folder / "executed.ipynb", as_version=4)


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    """``ddp`` in a notebook, with the model defined in a cell: run by a real kernel."""
    notebook = executed(EXAMPLES / "notebook.ipynb", tmp_path)
    assert notebook.cells
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in shown)
    found = re.search(r"test accuracy: ([\d.]+)%", text)
    assert found, text[-3000:]
    assert float(found[1]) > 85


@pytest.mark.slow
def test_a_notebook_shows_a_history_and_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nbformat = pytest.importorskip("nbformat")
    cells = [
        "from trainloop.history import History\nh = History()\nh.record('loss', 0.5, 0)\nh",
        "h.plot()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "history.ipynb")
    shown = [set(cell.outputs[-1].data) for cell in executed(tmp_path / "history.ipynb", tmp_path).cells]
    assert "text/html" in shown[0]
    assert "image/png" in shown[1]
