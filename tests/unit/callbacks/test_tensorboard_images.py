"""Images and other summaries that a callback writes beside TensorBoard's own: those of torch's SummaryWriter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, make_loop
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import text

from trainloop import AbstractCallback
from trainloop.callbacks import TensorBoard
from trainloop.errors import ConfigurationError


class Draws(AbstractCallback):
    def __init__(self, board: TensorBoard, images: Tensor) -> None:
        super().__init__("Draws")
        self.board, self.images = board, images

    def on_epoch_end(self) -> None:
        self.board.write_images("drawn", self.images)
        self.board.write_summary(text("note", "hello"))


def reader_of(folder: Path) -> Any:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


@pytest.mark.parametrize("images", [torch.rand(5, 3, 4, 6), torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8)])
def test_images_are_those_of_torchs_writer(images: Tensor, tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "here")
    make_loop().fit(num_epochs=2, callbacks=[board, Draws(board, images.requires_grad_(images.is_floating_point()))])
    with SummaryWriter(tmp_path / "there") as writer:
        writer.add_images("drawn", images.detach(), 0)
    [there] = reader_of(tmp_path / "there").Images("drawn")
    here = reader_of(tmp_path / "here")
    assert [image.step for image in here.Images("drawn")] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    for image in here.Images("drawn"):
        assert image.encoded_image_string == there.encoded_image_string
        assert (image.width, image.height) == (there.width, there.height)
    assert here.Tensors("note/text_summary")[-1].tensor_proto.string_val == [b"hello"]


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (2, 2, 8, 8), (0, 1, 8, 8)])
def test_what_is_no_batch_of_images(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"TensorBoard.write_images\('x'\): images has shape .*, but must be \(n, 1"
    ):
        TensorBoard(tmp_path).write_images("x", torch.zeros(shape))


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    board = TensorBoard(tmp_path)
    with pytest.raises(ConfigurationError, match=r"needs Pillow: pip install '\.\[plot\]'"):
        make_loop().fit(num_epochs=1, callbacks=[board, Draws(board, torch.rand(1, 1, 2, 2))])


def test_figures_are_closed_and_hyperparameters_may_have_any_keys(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    board = TensorBoard(tmp_path, hyperparameters={1: "a", (2, 3): 4})

    class Draws(AbstractCallback):
        def on_epoch_end(self) -> None:
            board.write_figure("closed", plt.figure(90))
            board.write_figure("open", plt.figure(91), close=False)

    before = plt.get_fignums()
    make_loop().fit(num_epochs=2, callbacks=[board, Draws("draws")])
    assert set(plt.get_fignums()) - set(before) == {91}
    plt.close(91)
    assert board.hyperparams == {"1": "a", "(2, 3)": 4}
