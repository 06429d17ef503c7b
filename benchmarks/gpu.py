"""The first day on a GPU: python3 -m benchmarks.gpu [--tiny], in at most ten minutes.

Follows ``gpu_plan.py``: checks of what can be wrong on a GPU only, ``tests/gpu``, then the same models with a
hand-written loop and with trainloop in one process. Writes ``GPU.rst`` and ``gpu.json`` after each part, with what is
expected and what to do otherwise. Needs torch (2.6 or newer), numpy, tensorboard and pytest, and no network.
The folder ``.deps`` may contain the other packages that trainloop imports (made on a machine with a network by
``pip install --target .deps cloudpickle psutil filelock tqdm``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_plan import BUDGET_S, PLAN

HERE = Path(__file__).parent
ROOT = HERE.parent
LIMITS_S = {name: item.limit_s for name, item in PLAN.items()}
NEEDED = ("torch", "numpy", "tensorboard", "pytest", "cloudpickle", "psutil", "filelock", "tqdm", "typing_extensions")
STARTS_S = 60.0  # until a process has imported torch, on a disk that reads it for the first time


class Runner:
    """Runs the parts in processes that it can end, one process for all as long as nothing fails.

    Parameters
    ----------
    tiny : bool
        Small models and few steps, without ``tests/gpu``: whether it runs, not how fast.
    out : Path
        Folder of ``GPU.rst`` and ``gpu.json``, written anew after each part.
    limits_s : dict of str to float
        The parts in their order, with how long each may take.
    budget_s : float
        For all of them together.
    """

    def __init__(self, tiny: bool, out: Path, limits_s: dict[str, float], budget_s: float = BUDGET_S) -> None:
        self.tiny, self.out, self.limits_s = tiny, out, limits_s
        self.began = time.monotonic()
        self.deadline = self.began + budget_s
        self.machine = "a machine that no part has told of"
        self.results: dict[str, dict[str, Any]] = {}

    def failures(self) -> int:
        return sum("failed" in values for values in self.results.values())

    def run(self) -> None:
        while left := [part for part in self.limits_s if part not in self.results]:
            if time.monotonic() > self.deadline:
                self.results.update({part: {"left_out": "the time was over"} for part in left})
            else:
                self._in_one_process(left)
        self.write()

    def _in_one_process(self, parts: list[str]) -> None:
        """Run parts until one fails, takes too long, or ends the process."""
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "benchmarks.gpu_parts", "--to", str(writing), *["--tiny"] * self.tiny, *parts]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), str(ROOT / ".deps")]))
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, pass_fds=[writing], start_new_session=True
        )
        os.close(writing)
        current, began, limit = parts[0], time.monotonic(), STARTS_S
        try:
            with os.fdopen(reading, "rb", buffering=0) as findings:
                while True:
                    ends = min(began + limit, self.deadline)
                    if not select.select([findings], [], [], max(ends - time.monotonic(), 0))[0]:
                        self._found(current, {"failed": f"ended after {time.monotonic() - began:.0f} s"}, began)
                        return
                    line = findings.readline()
                    if not line:
                        break
                    told = json.loads(line)
                    if "machine" in told:
                        self.machine = told["machine"]
                        if not (told["cuda"] or self.tiny):
                            sys.exit("There is no CUDA device here: --tiny runs on the CPU, and measures nothing.")
                    elif "begins" in told:
                        current, began = told["begins"], time.monotonic()
                        limit = self.limits_s[current]
                        print(f"{current} ...", flush=True)
                    else:
                        self._found(current, told["found"], began)
            exitcode = process.wait(STARTS_S)
            if current not in self.results:
                self._found(current, {"failed": f"its process ended with exit code {exitcode}"}, began)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its ranks and loaders' workers are of its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _found(self, part: str, found: dict[str, Any], began: float) -> None:
        self.results[part] = {**found, "took_s": round(time.monotonic() - began, 1)}
        print(f"    {self.results[part]}", flush=True)
        if "failed" in found:
            print(f"    expected: {PLAN[part].expected}\n    what to do: {PLAN[part].otherwise}", flush=True)
        self.write()

    def write(self) -> None:
        report = {
            "machine": self.machine,
            "tiny": self.tiny,
            "minutes": (time.monotonic() - self.began) / 60,
            "failures": self.failures(),
            "results": self.results,
        }
        (self.out / "gpu.json").write_text(json.dumps(report, indent=2) + "\n")
        (self.out / "GPU.rst").write_text(text_of(report))


def text_of(report: dict[str, Any]) -> str:
    """The report as reStructuredText."""
    lines = ["On a GPU", "========", "", f"Written by ``make gpu`` in {report['minutes']:.1f} minutes.", ""]
    lines += [report["machine"], "", f"failures: {report['failures']}", ""]
    for name, values in report["results"].items():
        lines += [name, "-" * len(name), ""]
        item = PLAN[name]
        values = {**values, "expected": item.expected}
        if "failed" in values:
            values["what to do"] = item.otherwise
        lines += [f"* {key}: {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="whether it runs: on the CPU, too, where there is no GPU")
    parser.add_argument("--out", type=Path, default=None, help="folder of GPU.rst and gpu.json (benchmarks/)")
    arguments = parser.parse_args()
    sys.path.append(str(ROOT / ".deps"))
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        names = " ".join(missing)
        sys.exit(f"{sys.executable} lacks {names}. On a machine with a network: pip install --target .deps {names}")
    out = arguments.out or (Path(tempfile.mkdtemp(prefix="trainloop-gpu-")) if arguments.tiny else HERE)
    limits = {part: limit for part, limit in LIMITS_S.items() if not (arguments.tiny and part.startswith("tests/gpu"))}
    runner = Runner(arguments.tiny, out, limits)
    runner.run()
    print(f"wrote {out / 'GPU.rst'} and gpu.json: {runner.failures()} failures")
    sys.exit(bool(runner.failures()))


if __name__ == "__main__":
    main()
