"""Two networks, two losses, two optimizers: a GAN that draws digits.

    python examples/gan.py --epochs 20

``get_loss`` yields its losses: first the discriminator steps, and then the generator steps against the updated
discriminator. Each loss gives gradients only to the parameters of its own optimizer.
"""

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from digits import arguments, datasets
from trainloop import MultiOptimizer, TrainLoop, TTModel
from trainloop.callbacks import TensorBoard

NOISE = 16


class GAN(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, NOISE, device=self.device))

    def get_loss(self, batch_data, criterion, device):
        images, _ = batch_data
        real = images.flatten(1)
        drawn = self(len(real))
        yes, no = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)
        detects = criterion(self.discriminator(real), yes) + criterion(self.discriminator(drawn.detach()), no)
        yield "discriminator", detects
        yield "generator", criterion(self.discriminator(drawn), yes)

    def get_predictions(self, batch_data, device):
        images, _ = batch_data
        return self.discriminator(images.flatten(1)).squeeze(1) > 0, torch.ones(len(images)), {}


def draw(image: Tensor) -> str:
    shades = " .:-=+*#%@"
    return "\n".join("".join(2 * shades[int(v * 9.99)] for v in row) for row in image.reshape(8, 8).tolist())


if __name__ == "__main__":
    args = arguments(__doc__, epochs=20)
    torch.manual_seed(0)
    train_set, _, test_set = datasets()
    model = GAN()
    optimizer = MultiOptimizer(
        {
            "generator": optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            "discriminator": optim.Adam(model.discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999)),
        }
    )
    tl = TrainLoop(
        model,
        DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True),
        None,
        DataLoader(test_set, batch_size=128),
        optimizer,
        nn.BCEWithLogitsLoss(),
    )
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/gan")])

    model.eval()
    with torch.no_grad():
        drawn = model(512).cpu()
    real = test_set.tensors[0].flatten(1)
    nearest = torch.cdist(drawn, real).min(1).values.mean().item()
    thought_real, _, _ = tl.predict_on_test_set()
    print(f"mean distance of a drawing to the nearest held-out digit: {nearest:.2f}   (of noise: 4.4)")
    print(f"held-out digits that the discriminator thinks real: {thought_real.double().mean().item():.0%}")
    print(draw(drawn[0]))
    print("TensorBoard logs: runs/gan   (tensorboard --logdir runs)")
