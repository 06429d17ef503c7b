"""The digest by which ranks compare their weights sees every bit, whatever the tensor looks like."""

from __future__ import annotations

import pytest
import torch

from trainloop.parallel.sharded.shards import bit_sums


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("layout", ["plain", "transposed", "offset", "odd", "empty", "scalar"])
def test_one_bit_shows(dtype: torch.dtype, layout: str) -> None:
    base = torch.arange(1.0, 36.0).to(dtype)
    tensor = {
        "plain": base[:32].reshape(4, 8),
        "transposed": base[:32].reshape(4, 8).t(),
        "offset": base[1:33],
        "odd": base,
        "empty": base[:0],
        "scalar": base[3],
    }[layout]
    copy = tensor.clone()
    assert bit_sums([copy, tensor]) == bit_sums([tensor, copy])
    for i in range(copy.numel()):
        other = copy.clone(memory_format=torch.contiguous_format)
        other.view(-1)[i] *= 1 + 2 * torch.finfo(dtype).eps
        assert bit_sums([other]) != bit_sums([copy]), i
