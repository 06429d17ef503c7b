"""Train on a text column and a picture column: scikit-learn's digits as PNG files, and a remark on each digit.

The text alone can't distinguish three or four digits, and the picture alone confuses some others. The ensemble uses
both. No weights are downloaded, because the network for the pictures is defined here. For a pretrained network, pass
``{"AG_IMAGE_NN": {"model": "<name, or a folder>"}}``.

python examples/tabular_multimodal.py
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from trainloop.tabular import TabularPredictor

SAID = {
    "it has a closed loop": (0, 6, 8, 9),
    "it has a long straight stroke": (1, 4, 7),
    "it is open and has a curve": (2, 3, 5),
}


def table(folder: Path, rows: int) -> pd.DataFrame:
    """Return a table with paths of pictures, remarks, and the digits."""
    folder.mkdir(exist_ok=True)
    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    lines = []
    for number in rng.permutation(len(digits))[:rows]:
        path = folder / f"{number}.png"
        blurred = (images[number].reshape(8, 8) + rng.normal(0, 6, (8, 8))).clip(0, 16)
        Image.fromarray((blurred * 15.9).astype("uint8")).save(path)
        remark = next(text for text, those in SAID.items() if digits[number] in those)
        lines.append((str(path), f"{remark}, said visitor {rng.integers(1000)}", digits[number]))
    return pd.DataFrame(lines, columns=["picture", "remark", "digit"])


def small_network(num_outputs: int) -> nn.Module:
    """Return a network for pictures of shape 3 x 16 x 16."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, num_outputs)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=900)
    args = parser.parse_args()

    data = table(Path("digits"), args.rows)
    train_data, test_data = data[: 2 * args.rows // 3], data[2 * args.rows // 3 :]
    predictor = TabularPredictor(label="digit", eval_metric="log_loss").fit(
        train_data,
        hyperparameters={
            "LR": {},  # the words of the remark
            "AG_IMAGE_NN": {"model": small_network, "size": 16, "learning_rate": 3e-3},
        },
    )
    print(predictor.leaderboard(test_data).to_string(index=False))
    accuracy = predictor.evaluate(test_data)["accuracy"]
    print(f"right on {100 * accuracy:.1f}% of {len(test_data)} held-out digits")
