"""``python -m trainloop``: an overview, and the commands ``doctor`` and ``checkpoint export``."""

from __future__ import annotations

import argparse
import os
import sys

from trainloop import __version__
from trainloop.doctor import examine
from trainloop.errors import TrainLoopError

OVERVIEW = f"""\
trainloop {__version__}: a PyTorch training loop; one script for one device, data parallel and distributed training.

  python -m trainloop doctor          check this machine and installation; --json for programs
  python -m trainloop checkpoint export CHECKPOINT model.safetensors
                                      write a checkpoint's weights, sharded or not, to one file
  from trainloop import TrainLoop, TTModel
  help(trainloop.TrainLoop)           describe all arguments
  loop.preflight()                    check a loop in seconds, before a long job
  print(loop)                         show its mode, devices, precision and batch size

README.rst has a first script, docs/ has the guides, and examples/ has a file for each feature."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 as the exit status if the doctor found a problem, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m trainloop", description=OVERVIEW.split("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser("doctor", help="check this machine and installation")
    doctor.add_argument("--json", action="store_true", help="for programs")
    actions = commands.add_parser("checkpoint", help="work with checkpoints").add_subparsers(
        dest="action", required=True
    )
    exporting = actions.add_parser("export", help="write a checkpoint's weights to one safetensors file")
    exporting.add_argument("checkpoint", help="a checkpoint, or a folder whose newest checkpoint is exported")
    exporting.add_argument("file", help="the file to write")
    given = parser.parse_args(arguments)
    if given.command is None:
        print(OVERVIEW)
        return 0
    if given.command == "checkpoint":
        from trainloop.checkpoint.export import export_from  # imports torch, which the doctor must not need
        from trainloop.resources.quota import format_bytes

        try:
            size, source = export_from(given.checkpoint, given.file)
        except TrainLoopError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{given.file}: {format_bytes(size)}, from {source}")
        return 0
    report = examine()
    print(report.to_json() if given.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its end
        status = 1
    sys.exit(status)
