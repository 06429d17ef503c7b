"""Models that ``benchmarks/gpu.py`` trains: sizes of real work, with nothing but torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainloop import TTBasicModel


class Block(nn.Module):
    """Two convolutions and a shortcut: He et al. 2016, https://arxiv.org/abs/1512.03385, for ResNet-18."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet18(TTBasicModel):
    """ResNet-18 over images of any size."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        for i in range(4):
            into, out = width * 2 ** max(i - 1, 0), width * 2**i
            layers += [Block(into, out, 1 if i == 0 else 2), Block(out, out, 1)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class GPT(TTBasicModel):
    """A decoder of GPT-2's form, with tied embeddings; the defaults are those of GPT-2 small (124 M parameters)."""

    def __init__(self, vocabulary: int = 50304, length: int = 1024, layers: int = 12, width: int = 768) -> None:
        super().__init__()
        self.length, self.num_layers, self.width = length, layers, width
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attention": nn.Linear(width, 3 * width),
                    "projection": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape
        heads = max(1, self.width // 64)
        h = self.tokens(x) + self.places(torch.arange(length, device=x.device))
        for block in self.blocks:
            q, k, v = block["attention"](block["norm"](h)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + block["projection"](mixed.transpose(1, 2).reshape(batch, length, -1))
            h = h + block["down"](functional.gelu(block["up"](block["norm2"](h))))
        return functional.linear(self.norm(h), self.tokens.weight)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        return criterion(self(x.to(device)).flatten(0, 1), y.to(device).flatten())

    def flops_per_token(self) -> float:
        """Forward and backward: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B."""
        parameters = sum(p.numel() for p in self.parameters()) - self.places.weight.numel()
        return 6 * parameters + 12 * self.num_layers * self.width * self.length
