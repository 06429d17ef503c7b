"""Keywords of other libraries, given to what is not the loop or a callback: an error says what they are called here."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from small_loop import make_loop
from trainloop import TTDistributedDataParallel
from trainloop.errors import ConfigurationError


def test_arguments_of_wrappers_in_fit() -> None:
    for arguments, words in [
        ({"ddp_model_args": {"find_unused": True}}, "has no 'find_unused'. Did you mean find_unused_parameters=?"),
        ({"fsdp_model_args": {"cpu_offload": True}}, "Did you mean offload_policy="),
        (
            {"dp_model_args": {"xyz": True}},
            "TTDataParallel has no 'xyz'. It has: device_ids, output_device, dim, devices.",
        ),
    ]:
        with pytest.raises(ConfigurationError) as error:
            make_loop().fit(1, **arguments)
        assert words in str(error.value)


def test_unknown_arguments_of_a_wrapper() -> None:
    with pytest.raises(ConfigurationError, match=r"'find_unused'\. Did you mean find_unused_parameters="):
        TTDistributedDataParallel(nn.Linear(2, 2), find_unused=True)
    assert not dist.is_initialized()
    with pytest.raises(ConfigurationError, match="there is no process group"):
        TTDistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
