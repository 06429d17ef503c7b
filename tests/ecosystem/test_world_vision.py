"""pytorch/examples with images, reduced to their core: mnist, vae, dcgan, siamese, super_resolution, imagenet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset
from world import Entry, Parts, in_all_modes, loaders, plain, randint, randn, steps

from trainloop import MultiOptimizer, TTModel
from trainloop.callbacks import LRScheduler

TRAIN, HELD_OUT = 37, 11


def images(size: int, channels: int = 1, classes: int = 10) -> tuple[TensorDataset, TensorDataset]:
    """Random images and labels to train on, and others."""
    return tuple(
        TensorDataset(randn(n, channels, size, size, seed=n), randint(classes, n, seed=n)) for n in (TRAIN, HELD_OUT)
    )  # type: ignore[return-value]


# -- mnist -------------------------------------------------------------------------------------------------------------


class Mnist(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        data, target = batch_data
        return F.nll_loss(self(data), target)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        data, target = batch_data
        return self(data), target, {}


def make_mnist(batch: int, shuffle: bool) -> Parts:
    model = Mnist().double()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    callbacks = [LRScheduler(StepLR, step_size=1, gamma=0.7)]
    return Parts(model, optimizer=optimizer, callbacks=callbacks, **loaders(*images(12), batch, shuffle))


def mnist_by_hand(parts: Parts, epochs: int) -> None:
    scheduler = StepLR(parts.optimizer, step_size=1, gamma=0.7)
    for _ in range(epochs):
        parts.model.train()
        for data, target in parts.train:
            parts.optimizer.zero_grad()
            F.nll_loss(parts.model(data), target).backward()
            parts.optimizer.step()
        scheduler.step()


# -- vae ---------------------------------------------------------------------------------------------------------------


class Vae(TTModel):
    """The noise comes with the batch, so that any number of ranks draws the same."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 20)
        self.fc21 = nn.Linear(20, 4)
        self.fc22 = nn.Linear(20, 4)
        self.fc3 = nn.Linear(4, 20)
        self.fc4 = nn.Linear(20, 64)

    def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, eps = batch_data
        return criterion(*self(x, eps), x)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, eps = batch_data
        return self(x, eps)[0], x, {}


class VaeLoss(nn.Module):
    """Reconstruction and KL divergence, summed over all elements and the batch."""

    reduction = "sum"

    def forward(self, recon: Tensor, mu: Tensor, logvar: Tensor, x: Tensor) -> Tensor:
        bce = F.binary_cross_entropy(recon, x, reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def make_vae(batch: int, shuffle: bool) -> Parts:
    model = Vae().double()
    data, held_out = (TensorDataset(torch.sigmoid(randn(n, 64)), randn(n, 4, seed=1)) for n in (TRAIN, HELD_OUT))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    return Parts(model, optimizer=optimizer, criterion=VaeLoss(), **loaders(data, held_out, batch, shuffle))


def vae_loss(model: Any, batch: Any) -> Tensor:
    x, eps = batch
    return VaeLoss()(*model(x, eps), x)


# -- dcgan -------------------------------------------------------------------------------------------------------------


class Dcgan(TTModel):
    """The discriminator steps on real and fake images, then the generator against the new discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4, 1, 0),
            nn.Sigmoid(), nn.Flatten(0),
        )  # fmt: skip

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        real, noise = batch_data
        fake = self.generator(noise)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        detects = criterion(on_real, torch.ones_like(on_real)) + criterion(on_fake, torch.zeros_like(on_fake))
        yield "discriminator", detects
        output = self.discriminator(fake)
        yield "generator", criterion(output, torch.ones_like(output))

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        real, noise = batch_data
        return self(noise), real, {}


def make_dcgan(batch: int, shuffle: bool) -> Parts:
    model = Dcgan().double()
    optimizers = {
        name: optim.Adam(getattr(model, name).parameters(), lr=0.002, betas=(0.5, 0.999))
        for name in ("discriminator", "generator")
    }
    data = TensorDataset(randn(TRAIN, 1, 8, 8), randn(TRAIN, 6, 1, 1, seed=1))
    parts = loaders(data, data, batch, shuffle)
    parts["held_out"] = None  # a discriminator's and a generator's loss are no mean over samples of either
    return Parts(model, optimizer=MultiOptimizer(optimizers), criterion=nn.BCELoss(), **parts)


def dcgan_by_hand(parts: Parts, epochs: int) -> None:
    generator, discriminator = parts.model.generator, parts.model.discriminator
    step_d, step_g = parts.optimizer.optimizer_list
    for real, noise in steps(parts, epochs):
        fake = generator(noise)
        discriminator.zero_grad()
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        (F.binary_cross_entropy(on_real, torch.ones_like(on_real))
         + F.binary_cross_entropy(on_fake, torch.zeros_like(on_fake))).backward()  # fmt: skip
        step_d.step()
        generator.zero_grad()
        output = discriminator(fake)
        F.binary_cross_entropy(output, torch.ones_like(output)).backward()
        step_g.step()


# -- siamese -----------------------------------------------------------------------------------------------------------


class Siamese(TTModel):
    """One tower, called twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(2 * 4 * 3 * 3, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.fc(torch.cat([self.tower(a), self.tower(b)], dim=1)).squeeze(1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        a, b, target = batch_data
        return criterion(self(a, b), target)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        a, b, target = batch_data
        return self(a, b), target, {}


def make_siamese(batch: int, shuffle: bool) -> Parts:
    model = Siamese().double()
    data, held_out = (
        TensorDataset(randn(n, 1, 8, 8), randn(n, 1, 8, 8, seed=1), randint(2, n).double()) for n in (TRAIN, HELD_OUT)
    )
    optimizer = optim.Adadelta(model.parameters())
    return Parts(model, optimizer=optimizer, criterion=nn.BCELoss(), **loaders(data, held_out, batch, shuffle))


def siamese_loss(model: Any, batch: Any) -> Tensor:
    a, b, target = batch
    return F.binary_cross_entropy(model(a, b), target)


# -- super resolution --------------------------------------------------------------------------------------------------


class SuperResolution(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2)
        self.conv2 = nn.Conv2d(8, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.conv2(F.relu(self.conv1(x))))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        small, large = batch_data
        return criterion(self(small), large)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        small, large = batch_data
        return self(small), large, {}


def make_super_resolution(batch: int, shuffle: bool) -> Parts:
    model = SuperResolution().double()
    data, held_out = (TensorDataset(randn(n, 1, 6, 6), randn(n, 1, 12, 12, seed=1)) for n in (TRAIN, HELD_OUT))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    return Parts(model, optimizer=optimizer, criterion=nn.MSELoss(), **loaders(data, held_out, batch, shuffle))


# -- imagenet ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, planes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(x + self.bn2(self.conv2(out)), inplace=True)


class ResNet(TTModel):
    """A residual network whose top-1 and top-5 accuracy are logged, as imagenet/main.py's meters do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, bias=False)
        self.layer1 = nn.Sequential(Block(8), Block(8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer1(self.stem(x)).mean((2, 3)))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        image, target = batch_data
        output = self(image)
        for k in (1, 5):
            right = (output.detach().topk(k).indices == target[:, None]).any(1)
            self.log(f"acc@{k}", right.double().mean())
        return criterion(output, target)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        image, target = batch_data
        return self(image), target, {}


def make_imagenet(batch: int, shuffle: bool) -> Parts:
    model = ResNet().double()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    callbacks = [LRScheduler(StepLR, step_size=1, gamma=0.1)]
    parts = loaders(*images(12, channels=3), batch, shuffle)
    return Parts(model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), callbacks=callbacks, **parts)


def imagenet_by_hand(parts: Parts, epochs: int) -> None:
    scheduler = StepLR(parts.optimizer, step_size=1, gamma=0.1)
    for _ in range(epochs):
        parts.model.train()
        for image, target in parts.train:
            loss = F.cross_entropy(parts.model(image), target)
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()
        scheduler.step()


test_single, test_ddp = in_all_modes(
    Entry("mnist", make_mnist, mnist_by_hand),
    Entry("vae", make_vae, plain(vae_loss)),
    Entry("dcgan", make_dcgan, dcgan_by_hand, loop={"sync_batchnorm": True}),
    Entry("siamese", make_siamese, plain(siamese_loss)),
    Entry("super_resolution", make_super_resolution, plain(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))),
    Entry("imagenet", make_imagenet, imagenet_by_hand, loop={"sync_batchnorm": True}),
)
