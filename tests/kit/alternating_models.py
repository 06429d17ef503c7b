"""Models that step one optimizer after another within a batch, and the loops that a user would write for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

from trainloop import MultiOptimizer, TTModel

NZ = 5


class DCGAN(TTModel):
    """pytorch/examples, dcgan/main.py: its two networks and its three parts of a step, for images of 16 x 16."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NZ, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(True),
            nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 4, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Iterator[Any]:
        real = batch_data[0].to(device)
        yes, no = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
        noise = torch.randn(len(real), NZ, 1, 1, device=device)
        drawn = self.generator(noise)
        detected = criterion(self.discriminator(real).view(-1), yes)
        yield "discriminator", detected + criterion(self.discriminator(drawn.detach()).view(-1), no)
        yield "generator", criterion(self.discriminator(drawn).view(-1), yes)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.discriminator(batch_data[0].to(device)).view(-1), batch_data[0], {}


def images(n: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(n, 1, 16, 16, generator=torch.Generator().manual_seed(0)))


def dcgan_optimizers(model: DCGAN) -> MultiOptimizer:
    return MultiOptimizer(
        {
            "generator": optim.Adam(model.generator.parameters(), lr=0.01, betas=(0.5, 0.999)),
            "discriminator": optim.Adam(model.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999)),
        }
    )


def dcgan_by_hand(model: DCGAN, loader: Any, epochs: int) -> tuple[float, float]:
    """The loop of dcgan/main.py. Returns the last epoch's mean losses of D and of G."""
    net_d, net_g = model.discriminator, model.generator
    optimizer_g, optimizer_d = dcgan_optimizers(model)
    criterion = nn.BCELoss()
    for _ in range(epochs):
        total_d = total_g = count = 0.0
        for (data,) in loader:
            net_d.zero_grad()
            label = torch.full((len(data),), 1.0)
            noise = torch.randn(len(data), NZ, 1, 1)
            fake = net_g(noise)
            err_d_real = criterion(net_d(data).view(-1), label)
            err_d_real.backward()
            label.fill_(0.0)
            err_d_fake = criterion(net_d(fake.detach()).view(-1), label)
            err_d_fake.backward()
            optimizer_d.step()

            net_g.zero_grad()
            label.fill_(1.0)
            err_g = criterion(net_d(fake).view(-1), label)
            err_g.backward()
            optimizer_g.step()
            total_d += (err_d_real + err_d_fake).item() * len(data)
            total_g += err_g.item() * len(data)
            count += len(data)
    return total_d / count, total_g / count


class WGAN(TTModel):
    """Wasserstein: the critic steps three times a batch, each time on other noise, which is of the data."""

    def __init__(self, critic_steps: int = 3, weighted: bool = False) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NZ, 12), nn.Tanh(), nn.Linear(12, 6))
        self.critic = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.critic_steps = critic_steps
        self.weighted = weighted

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Iterator[Any]:
        real, noise, tokens = batch_data
        for i in range(self.critic_steps):
            fake = self.generator(noise[:, i]).detach()
            each = (self.critic(fake) - self.critic(real)).squeeze(1) + 0.1 * self.critic(real).square().squeeze(1)
            yield "critic", self.mean(each, tokens)
        self.log("critic_now", self.critic(real).mean())
        yield "generator", self.mean(-self.critic(self.generator(noise[:, -1])).squeeze(1), tokens)

    def mean(self, each: Tensor, tokens: Tensor) -> Any:
        if self.weighted:
            return (each * tokens).sum() / tokens.sum(), tokens.sum()
        return each.mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.critic(batch_data[0]), batch_data[0], {}


def points(n: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    real, noise = torch.randn(n, 6, generator=generator), torch.randn(n, 4, NZ, generator=generator)
    return TensorDataset(real.to(dtype), noise.to(dtype), torch.randint(1, 30, (n,), generator=generator))


def wgan_optimizers(model: WGAN) -> MultiOptimizer:
    return MultiOptimizer(
        {
            "generator": optim.Adam(model.generator.parameters(), lr=0.02),
            "critic": optim.RMSprop(model.critic.parameters(), lr=0.02),
        }
    )


def wgan_by_hand(model: WGAN, loader: Any, epochs: int, max_norm: float | None = None) -> None:
    optimizers = wgan_optimizers(model)
    for _ in range(epochs):
        for batch in loader:
            # The generator of losses, run by hand; each loss reaches all weights, as in a plain loop.
            for name, output in model.get_loss(batch, None, torch.device("cpu")):
                optimizers.zero_grad()
                (output[0] if isinstance(output, tuple) else output).backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(getattr(model, name).parameters(), max_norm)
                optimizers[name].step()


class Discrepancy(TTModel):
    """Maximum classifier discrepancy: three optimizers step on one loss, two on the next one, and one on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(6, 5)
        self.first, self.second = nn.Linear(5, 1), nn.Linear(5, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Iterator[Any]:
        real = batch_data[0]
        yield ("generator", "first", "second"), self.fits(real)
        yield ("first", "second"), self.fits(real) - self.differ(real)
        yield "generator", self.differ(real)

    def fits(self, x: Tensor) -> Tensor:
        seen = self.generator(x).tanh()
        return (self.first(seen) - x[:, :1]).square().mean() + (self.second(seen) - x[:, :1]).square().mean()

    def differ(self, x: Tensor) -> Tensor:
        seen = self.generator(-x).tanh()
        return (self.first(seen) - self.second(seen)).abs().mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.first(self.generator(batch_data[0]).tanh()), batch_data[0], {}


def discrepancy_optimizers(model: Discrepancy) -> MultiOptimizer:
    names = ("generator", "first", "second")
    return MultiOptimizer({name: optim.Adam(getattr(model, name).parameters(), lr=0.02) for name in names})


def discrepancy_by_hand(model: Discrepancy, loader: Any, epochs: int, max_norm: float | None = None) -> None:
    optimizers = discrepancy_optimizers(model)
    for _ in range(epochs):
        for batch in loader:
            for which, loss in model.get_loss(batch, None, torch.device("cpu")):
                names = which if isinstance(which, tuple) else (which,)
                optimizers.zero_grad()
                loss.backward()
                if max_norm is not None:
                    own = [p for name in names for p in getattr(model, name).parameters()]
                    nn.utils.clip_grad_norm_(own, max_norm)
                for name in names:
                    optimizers[name].step()
