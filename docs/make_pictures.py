"""Makes the pictures of the documentation from the demo's training: python docs/make_pictures.py

``history.png`` by ``history.plot``; ``tensorboard.png`` by TensorBoard itself, in headless Chromium (must be there).
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PICTURES = HERE / "_static"
EPOCHS = 12

TRAIN = """
import sys
sys.path.insert(0, {examples!r})
import torch
from digits import DigitsCNN, loaders
from torch import nn, optim
from trainloop import TrainLoop
from trainloop.callbacks import TensorBoard

if __name__ == "__main__":
    torch.manual_seed(0)
    model = DigitsCNN()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    tl = TrainLoop(model, *loaders(16), optimizer, nn.CrossEntropyLoss(), gpu_mode="ddp", devices=2, seed=0)
    tl.fit(num_epochs={epochs}, callbacks=[TensorBoard("runs/ddp", log_every_n_steps=1)])
    tl.history.plot({plot!r})
"""


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """A TensorBoard over ``folder``, on loopback; gives its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(folder),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/data/runs", timeout=5).read()
                break
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def screenshot(address: str, path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("a screenshot needs Chromium on the PATH")
    options = (
        "--headless --no-sandbox --hide-scrollbars --disable-background-networking --disable-sync "
        "--disable-component-update --no-first-run --window-size=1280,850 --virtual-time-budget=60000 "
        "--enable-unsafe-swiftshader --run-all-compositor-stages-before-draw"
    )
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, *options.split(), f"--user-data-dir={profile}", f"--screenshot={path}", address],
            check=True,
            timeout=180,
            capture_output=True,
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        values = {"examples": str(HERE.parent / "examples"), "epochs": EPOCHS, "plot": str(PICTURES / "history.png")}
        script.write_text(TRAIN.format(**values))
        subprocess.run([sys.executable, str(script)], cwd=folder, check=True)
        with tensorboard(folder / "runs") as address:
            screenshot(f"{address}/?darkMode=false#custom_scalars", PICTURES / "tensorboard.png")


if __name__ == "__main__":
    main()
