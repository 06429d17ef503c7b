"""Requests for devices, masks, strategies and batches: the specification's tables, and what is refused."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainloop import devices
from trainloop.devices import (
    check_num_nodes,
    choose_devices,
    effective_batch_size,
    find_usable_cuda_devices,
    parse_devices,
    resolve,
    resolve_mode,
    visible_devices,
)
from trainloop.errors import ConfigurationError, DeviceError, ResourceError
from trainloop.resources import gpus as gpu_names
from trainloop.resources import lease
from trainloop.resources.gpus import child_mask

# -- parse_devices: the documented tables ----------------------------------------------------------------------------

PARSED = [
    (3, [0, 1, 2]),
    (-1, [0, 1, 2, 3]),
    ([0], [0]),
    ([1, 3], [1, 3]),
    ((1, 3), [1, 3]),
    ("3", [0, 1, 2]),
    ("1, 3", [1, 3]),
    ("1,3", [1, 3]),
    ("-1", [0, 1, 2, 3]),
    ("auto", [0, 1, 2, 3]),
    (" AUTO\t", [0, 1, 2, 3]),
    ("3,", [3]),
    ("0,", [0]),
    (range(2), [0, 1]),
    # order is kept; 0 is an index like the others
    ([2, 0], [2, 0]),
    ("2,0", [2, 0]),
    (" 3 ", [0, 1, 2]),
    (" -1 ", [0, 1, 2, 3]),
    ("1 , 3 , ", [1, 3]),
    (range(3, -1, -1), [3, 2, 1, 0]),
    (np.int64(2), [0, 1]),
    ([np.int32(3)], [3]),
    (4, [0, 1, 2, 3]),
]


@pytest.mark.parametrize("request_, expected", PARSED, ids=[repr(case[0]) for case in PARSED])
def test_a_request_means_these_indices(request_: object, expected: list[int]) -> None:
    indices = parse_devices(request_, count=4)
    assert indices == expected
    assert all(type(index) is int for index in indices)


class _Nameless:
    def __repr__(self) -> str:
        raise RuntimeError


MALFORMED = [
    # no device asked for
    *((given, "no device") for given in (0, "0", " 0 ", "00", [], (), "", "  ", ",", " , ", range(0), "-0")),
    # -1 means 'all' only alone
    *((given, "1 or more, or -1 for all") for given in (-2, "-2", -(10**30))),
    *((given, "only by itself") for given in ([-1], "-1,", "0,-1", [0, -1], "-1,-1", "-2,")),
    # no number
    *((given, "is a bool") for given in (True, False, [True], [0, False])),
    (np.True_, "is neither a number nor a list"),
    *((given, "is neither a number nor a list") for given in (None, 3.0, b"3", bytearray(b"3"), {1}, {0: 1})),
    *((given, "is neither a number nor a list") for given in (frozenset({1}), np.array([0, 1]), object(), 1 + 0j)),
    *((given, "is neither a number nor a list") for given in (iter([0]), _Nameless())),
    *((given, "an index must be an int") for given in ([1.0], ["1"], [[0]], [None], ([0], [1]))),
    *((given, "listed twice") for given in ([0, 0], "1,1", (3, 1, 3))),
    # not there
    *((given, "no device") for given in ([4], "4,", [0, 9], "0,4", range(5), [10**5000])),
    *((given, "only 4 are available") for given in (5, "5", "999999999999999999", 10**30)),
    *(
        (given, "is not a number")
        for given in (
            *("a", "3.0", "0x1", "1e1", "0-3", "1 3", "1;3", "cuda:0", "[0, 1]", "1_0", "+3", "٣", "３", "²", "all"),  # noqa: RUF001
            *("0,a", "1,+3", "1,1_0", "- 1", "--1", "auto,", "٣,", "9" * 5000, "None", "1\x003"),
        )
    ),
    *((given, "number is missing") for given in ("1,,3", "1, ,3", ",1", "1,,")),
]


@pytest.mark.parametrize("request_, what", MALFORMED, ids=[f"{i}" for i in range(len(MALFORMED))])
def test_a_malformed_request_is_refused_with_what_was_given_and_what_to_write(request_: object, what: str) -> None:
    with pytest.raises(DeviceError, match=what) as caught:
        parse_devices(request_, count=4)
    message = str(caught.value)
    assert message.startswith("devices=")
    assert "There are 4 devices (0 to 3)" in message
    assert "devices='auto'" in message
    assert len(message) < 500
    if isinstance(request_, str) and len(request_) < 100:
        assert message.startswith(f"devices={request_!r}: ")


def test_there_are_more_than_sixty_malformed_requests() -> None:
    assert len(MALFORMED) > 60


@pytest.mark.parametrize("request_", [0, "0", [], ""])
def test_asking_for_no_device_points_to_the_cpu(request_: object) -> None:
    with pytest.raises(DeviceError, match="accelerator='cpu'"):
        parse_devices(request_, count=1)


@pytest.mark.parametrize("request_", [case[0] for case in PARSED] + [1, "1", [0], 0, "", None], ids=repr)
def test_nothing_can_be_had_where_there_is_nothing(request_: object) -> None:
    with pytest.raises(DeviceError, match="No device is visible"):
        parse_devices(request_, count=0)


@pytest.mark.parametrize("count", [float("nan"), 2.0, -1, True, None, "4"], ids=repr)
def test_the_number_of_visible_devices_is_checked(count: Any) -> None:
    with pytest.raises(DeviceError, match=r"count=.* must be the number of visible devices"):
        parse_devices(1, count=count)


def test_the_message_counts_one_device_as_one() -> None:
    with pytest.raises(DeviceError, match=r"only 1 is available\. There is 1 device \(device 0\)"):
        parse_devices(2, count=1)


@given(st.integers(1, 16), st.integers(1, 64))
def test_a_number_is_the_first_so_many(number: int, count: int) -> None:
    if number > count:
        with pytest.raises(DeviceError):
            parse_devices(number, count)
    else:
        assert parse_devices(number, count) == parse_devices(str(number), count) == list(range(number))
        assert parse_devices(list(range(number)), count) == parse_devices(number, count)


@given(st.text(alphabet="0123456789-+_, autoAUTO.\t٣", max_size=8), st.integers(0, 6))
def test_any_text_gives_distinct_indices_or_a_device_error(text: str, count: int) -> None:
    try:
        indices = parse_devices(text, count)
    except DeviceError:
        return
    assert indices
    assert len(set(indices)) == len(indices)
    assert all(0 <= index < count for index in indices)


@given(st.lists(st.one_of(st.integers(-2, 6), st.booleans(), st.none(), st.floats()), max_size=5), st.integers(0, 6))
def test_a_list_is_itself_or_a_device_error(entries: list[object], count: int) -> None:
    valid = (
        bool(entries)
        and all(type(entry) is int and 0 <= entry < count for entry in entries)
        and len(set(entries)) == len(entries)
    )
    if valid:
        assert parse_devices(entries, count) == entries
    else:
        with pytest.raises(DeviceError):
            parse_devices(entries, count)


# -- resolve ---------------------------------------------------------------------------------------------------------

CHOSEN = [
    # accelerator, devices, cuda, mps -> kind, indices
    ("auto", "auto", 4, False, "cuda", [0, 1, 2, 3]),
    ("auto", "auto", 2, True, "cuda", [0, 1]),
    ("auto", "auto", 0, True, "mps", [0]),
    ("auto", "auto", 0, False, "cpu", [0]),
    ("auto", "-1", 0, False, "cpu", [0]),
    ("auto", -1, 0, False, "cpu", [0]),
    ("auto", 2, 0, False, "cpu", [0, 0]),
    (" GPU ", "3,", 4, False, "cuda", [3]),
    ("gpu", 1, 0, True, "mps", [0]),
    ("gpu", "auto", 2, True, "cuda", [0, 1]),
    ("Cuda", [2, 0], 4, False, "cuda", [2, 0]),
    ("mps", [0], 4, True, "mps", [0]),
    ("mps", "auto", 0, True, "mps", [0]),
    ("mps", -1, 0, True, "mps", [0]),
    ("cpu", "auto", 4, True, "cpu", [0]),
    ("cpu", " Auto ", 0, False, "cpu", [0]),
    ("cpu", 3, 4, False, "cpu", [0, 0, 0]),
    ("cpu", "3", 0, False, "cpu", [0, 0, 0]),
    ("cpu", " 1 ", 0, False, "cpu", [0]),
]


@pytest.mark.parametrize("accelerator, asked, cuda, mps, kind, indices", CHOSEN)
def test_an_accelerator_and_its_devices(
    accelerator: str, asked: object, cuda: int, mps: bool, kind: str, indices: list[int]
) -> None:
    choice = choose_devices(accelerator, asked, cuda=cuda, mps=mps)
    assert choice == (kind, indices, "")


REFUSED = [
    ("gpu", "auto", 0, False, r"this machine has no such device. It has: cpu. Use accelerator='cpu'"),
    ("gpu", 1, 0, False, "no such device"),
    ("cuda", "auto", 0, False, r"this machine has no such device. It has: cpu. Use accelerator='cpu'"),
    ("cuda", "auto", 0, True, r"It has: mps, cpu. Use accelerator='mps'"),
    ("mps", "auto", 2, False, r"It has: 2 CUDA devices, cpu. Use accelerator='cuda'"),
    ("mps", 2, 0, True, "only 1 is available"),
    ("mps", [1], 0, True, "no device 1"),
    ("auto", 2, 0, True, "only 1 is available"),
    ("cpu", -1, 0, False, "number of processes"),
    ("cpu", "-1", 4, False, "number of processes"),
    ("cpu", 0, 0, False, "number of processes"),
    ("cpu", "0", 0, False, "number of processes"),
    ("cpu", [0], 0, False, "number of processes"),
    ("cpu", "0,", 0, False, "number of processes"),
    ("cpu", "1,2", 0, False, "number of processes"),
    ("cpu", True, 0, False, "number of processes"),
    ("cpu", None, 0, False, "number of processes"),
    ("cpu", 2.0, 0, False, "number of processes"),
    ("cpu", "1_0", 0, False, "number of processes"),
    ("auto", [0], 0, False, "no GPU is visible, and on the CPU"),
    ("auto", -2, 0, False, "no GPU is visible"),
    ("auto", 0, 4, False, "no device was requested"),
]


@pytest.mark.parametrize("accelerator, asked, cuda, mps, what", REFUSED)
def test_an_absent_accelerator_or_device_is_refused(
    accelerator: str, asked: object, cuda: int, mps: bool, what: str
) -> None:
    with pytest.raises(DeviceError, match=what):
        choose_devices(accelerator, asked, cuda=cuda, mps=mps)


@pytest.mark.parametrize("asked", [10**6, str(10**6), 10**18, 65])
def test_an_absurd_number_of_processes_is_refused(asked: object) -> None:
    with pytest.raises(DeviceError, match=rf"devices='?{asked}'?: .*At most 64 are allowed on 2 cores\. Use devices=2"):
        choose_devices("cpu", asked, cuda=0, cores=2)
    assert len(choose_devices("cpu", 65, cuda=0, cores=9).indices) == 65


@pytest.mark.parametrize(("asked", "cores", "note"), [(2, 1, "devices=2 on 1 CPU core: "), (3, 2, "on 2 CPU cores: ")])
def test_more_processes_than_cores_are_told(asked: int, cores: int, note: str) -> None:
    assert note in choose_devices("cpu", asked, cuda=0, cores=cores).note
    assert choose_devices("cpu", asked, cuda=0, cores=asked).note == ""


@pytest.mark.parametrize("accelerator", ["tpu", "", None, 0, True, "cuda:0", "gpus", ["gpu"]], ids=repr)
def test_an_unknown_accelerator_is_a_configuration_error_that_lists_the_names(accelerator: object) -> None:
    with pytest.raises(ConfigurationError, match="must be one of 'auto', 'gpu', 'cuda', 'mps', 'cpu'") as caught:
        choose_devices(accelerator, "auto", cuda=1)
    assert not isinstance(caught.value, DeviceError)
    assert repr(accelerator) in str(caught.value)


def test_an_interactive_session_takes_one_of_several_gpus_and_says_so() -> None:
    choice = choose_devices("auto", "Auto", cuda=4, interactive=True)
    assert choice.indices == [0]
    assert "uses one of the 4 GPUs" in choice.note
    assert "devices=4" in choice.note


@pytest.mark.parametrize("asked, indices", [(4, [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), ([2, 0], [2, 0])])
def test_an_explicit_request_is_honoured_in_an_interactive_session(asked: object, indices: list[int]) -> None:
    assert choose_devices("auto", asked, cuda=4, interactive=True) == ("cuda", indices, "")


def test_one_gpu_in_an_interactive_session_needs_no_word() -> None:
    assert choose_devices("auto", "auto", cuda=1, interactive=True) == ("cuda", [0], "")


def test_resolve_gives_torch_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_interactive", lambda: False)
    monkeypatch.setattr(devices, "_cuda_count", lambda: 3)
    assert resolve("auto", [2, 0]) == [torch.device("cuda", 2), torch.device("cuda", 0)]
    assert resolve("cpu", 2) == [torch.device("cpu"), torch.device("cpu")]


def test_resolve_warns_in_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_interactive", lambda: True)
    monkeypatch.setattr(devices, "_cuda_count", lambda: 3)
    with pytest.warns(UserWarning, match="uses one of the 3 GPUs"):
        assert resolve() == [torch.device("cuda", 0)]


# -- masks -----------------------------------------------------------------------------------------------------------

MASKS = [
    (None, None),
    ("", []),
    ("-1", []),
    ("3,1", ["3", "1"]),
    ("0, 1, 2, -1, 3", ["0", "1", "2"]),
    ("0,1,2,1", []),
    ("0,-1,0", ["0"]),
    ("2, +3, -0, 5", ["2", "3", "0", "5"]),
    ("1gpu2,2ampere", ["1", "2"]),
    ("4,3,two,one", ["4", "3"]),
    ("one,two,3,4", []),
    ("0,,1", ["0"]),
    ("GPU-1a,GPU-2b", ["GPU-1a", "GPU-2b"]),
    ("GPU-1a,GPU-1a", []),
    ("GPU-1a,MIG-2b", ["GPU-1a"]),
    ("GPU-1a,0", ["GPU-1a"]),
    ("0,GPU-1a", ["0"]),
    ("MIG-1a", ["MIG-1a"]),
    ("MIG-1a,GPU-2b", ["MIG-1a"]),
    ("MIG-GPU-1a/1/0,MIG-GPU-1a/2/0", ["MIG-GPU-1a/1/0", "MIG-GPU-1a/2/0"]),
    ("NoDevFiles", []),
    ("٣", []),
]


@pytest.mark.parametrize("text, expected", MASKS)
def test_the_mask_is_read_as_cuda_reads_it(text: str | None, expected: list[str] | None) -> None:
    assert visible_devices({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == expected


@pytest.mark.skipif(not hasattr(torch.cuda, "_parse_visible_devices"), reason="torch's own reader has moved")
@pytest.mark.parametrize("text", [case[0] for case in MASKS if case[0] not in (None, "٣")])
def test_torch_reads_the_mask_alike(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert visible_devices() == [str(entry) for entry in torch.cuda._parse_visible_devices()]


def test_a_child_mask_is_composed_with_the_parent_s() -> None:
    assert child_mask([1], visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,7"})) == "5"
    assert child_mask([2, 0], ["4", "5", "7"]) == "7,4"
    assert child_mask([0, 1], ["GPU-a", "GPU-b"]) == "GPU-a,GPU-b"
    assert child_mask([1], ["MIG-a", "MIG-b"]) == "MIG-b"
    assert child_mask([1, 0], None) == "1,0"
    assert child_mask([], None) == child_mask([], ["4"]) == ""
    assert visible_devices({"CUDA_VISIBLE_DEVICES": child_mask([], None)}) == []


@given(st.data())
def test_a_grandchild_s_devices_are_the_grandparent_s(data: st.DataObject) -> None:
    own = data.draw(st.permutations([str(i) for i in range(8)]))
    first = data.draw(st.lists(st.integers(0, 7), unique=True, min_size=1))
    child = visible_devices({"CUDA_VISIBLE_DEVICES": child_mask(first, own)})
    assert child == [own[i] for i in first]
    second = data.draw(st.lists(st.integers(0, len(first) - 1), unique=True))
    assert visible_devices({"CUDA_VISIBLE_DEVICES": child_mask(second, child)}) == [own[first[i]] for i in second]


@pytest.mark.parametrize("index", [3, -1])
def test_a_child_gets_no_device_that_its_parent_does_not_see(index: int) -> None:
    with pytest.raises(DeviceError, match=rf"device {index} .* CUDA_VISIBLE_DEVICES=4,5,7 has no such device"):
        child_mask([index], ["4", "5", "7"])


def test_a_process_gets_one_mig_instance() -> None:
    with pytest.raises(ResourceError, match=r"2 MIG instances were chosen for one process .* one device per process"):
        child_mask([0, 1], ["MIG-a", "MIG-b"])


# -- strategies and batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, num_devices, num_nodes, mode",
    [
        ("auto", 1, 1, "single"),
        ("auto", 2, 1, "ddp"),
        ("auto", 1, 2, "ddp"),
        ("single", 1, 1, "single"),
        ("single", 4, 1, "single"),
        ("dp", 4, 1, "dp"),
        ("ddp", 1, 1, "ddp"),
        ("ddp", 8, 10, "ddp"),
        ("ddp_spawn", 2, 1, "ddp"),
        ("ddp_notebook", 2, 1, "ddp"),
        ("ddp_fork", 2, 1, "ddp"),
    ],
)
def test_strategies(name: str, num_devices: int, num_nodes: int, mode: str) -> None:
    assert resolve_mode(name, num_devices, num_nodes) == mode


@pytest.mark.parametrize(
    "name, what",
    [
        ("ddp2", "this strategy is not supported. Use gpu_mode='ddp'"),
        ("horovod", "Use gpu_mode='ddp', with torchrun or Slurm"),
        ("ddp_sharded", "Use gpu_mode='fsdp'"),
        ("ddp_sharded_spawn", "Use gpu_mode='fsdp'"),
        ("fsdp_native", "gpu_mode='fsdp'"),
        ("deepspeed", "Use gpu_mode='fsdp'"),
        ("deepspeed_stage_3", "Use gpu_mode='fsdp'"),
        ("DDP", "gpu_mode='DDP': must be 'single', 'dp', 'ddp', 'fsdp' or 'auto'"),
        ("", "must be 'single'"),
        (None, "gpu_mode=None: must be 'single'"),
        (True, "gpu_mode=True: must be 'single'"),
        (["ddp"], "must be 'single'"),
    ],
)
def test_strategies_that_are_not_offered_name_their_replacement(name: object, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what) as caught:
        resolve_mode(name, 2)
    assert f"gpu_mode={name!r}" in str(caught.value)


@pytest.mark.parametrize("name", ["single", "dp"])
def test_one_node_modes_refuse_more(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"gpu_mode='{name}' with num_nodes=2.*Use gpu_mode='ddp'"):
        resolve_mode(name, 2, 2)


@pytest.mark.parametrize("name", ["ddp", "dp"])
def test_an_apple_gpu_is_one_device(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"on mps: .*Use gpu_mode='single'"):
        resolve_mode(name, 1, kind="mps")
    assert resolve_mode("auto", 1, kind="mps") == "single"


@pytest.mark.parametrize("num_nodes", [0, -1, True, False, "2", 2.0, None, [1]], ids=repr)
def test_a_number_of_nodes_is_an_int_of_one_or_more(num_nodes: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"num_nodes={re.escape(repr(num_nodes))}: must be an int of 1"):
        check_num_nodes(num_nodes)


@pytest.mark.parametrize(
    "mode, num_devices, num_nodes, expected",
    [
        ("single", 1, 1, 7),
        ("ddp", 8, 1, 56),
        ("ddp", 8, 10, 560),
        ("dp", 8, 1, 7),
        ("auto", 8, 10, 560),
        ("ddp_spawn", 2, 1, 14),
    ],
)
def test_the_effective_batch_for_a_batch_size_of_seven(
    mode: str, num_devices: int, num_nodes: int, expected: int
) -> None:
    assert effective_batch_size(mode, 7, num_devices, num_nodes) == expected


def test_dp_has_no_nodes() -> None:
    with pytest.raises(ConfigurationError, match="only one node"):
        effective_batch_size("dp", 7, 8, 10)


# -- find_usable_cuda_devices ----------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Four faked GPUs, of which 1 is occupied; the list fills with the indices tried."""
    tried: list[int] = []

    def try_one(index: int) -> bool:
        tried.append(index)
        return index != 1

    monkeypatch.setattr(devices, "_cuda_count", lambda: 4)
    monkeypatch.setattr(gpu_names, "_Probe", lambda: SimpleProbe(try_one))
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_names, "_own_leases", {})
    yield tried
    for held in gpu_names._own_leases.values():
        held.close()


class SimpleProbe(contextlib.nullcontext["SimpleProbe"]):
    def __init__(self, accepts_a_tensor: Callable[[int], bool]) -> None:
        super().__init__(self)
        self.accepts_a_tensor = accepts_a_tensor


def test_usable_gpus_are_the_first_that_take_a_tensor_and_no_more_are_tried(gpus: list[int]) -> None:
    assert find_usable_cuda_devices(2) == [0, 2]
    assert gpus == [0, 1, 2]


def test_all_usable_gpus(gpus: list[int]) -> None:
    assert find_usable_cuda_devices() == [0, 2, 3]
    assert find_usable_cuda_devices(-1) == [0, 2, 3]


def test_too_few_usable_gpus_name_the_occupied(gpus: list[int]) -> None:
    with pytest.raises(DeviceError, match=r"only 3 of 4 GPUs can be used now. .*other runs: GPUs \[1\]"):
        find_usable_cuda_devices(4)


def test_more_than_visible_is_refused_before_any_try(gpus: list[int]) -> None:
    with pytest.raises(DeviceError, match="num_devices=5: only 4"):
        find_usable_cuda_devices(5)
    assert gpus == []


@pytest.mark.parametrize("number", [1, -1])
def test_no_visible_gpu_is_an_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_cuda_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"only 0 CUDA devices are visible here\. Use accelerator='cpu'"):
        find_usable_cuda_devices(number)


def test_none_of_none_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_cuda_count", lambda: 0)
    assert find_usable_cuda_devices(0) == []


def test_all_usable_of_no_usable_is_an_error(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_names, "_Probe", lambda: SimpleProbe(lambda index: False))
    with pytest.raises(DeviceError, match=r"only 0 of 4 GPUs can be used now. .*: GPUs \[0, 1, 2, 3\]"):
        find_usable_cuda_devices(-1)


def test_the_choice_is_leased_and_stays_the_process_s_own(gpus: list[int]) -> None:
    assert find_usable_cuda_devices(2) == [0, 2]
    assert find_usable_cuda_devices(2) == [0, 2]
    with pytest.raises(ResourceError, match="other runs have leased gpus gpu-0"):
        lease.acquire({"gpu": lease.Request(1, ["gpu-0"])}, timeout_s=0)
    lease.acquire({"gpu": lease.Request(1, ["gpu-1"])}, timeout_s=0).close()  # tried, and given back


def test_what_another_run_has_leased_is_skipped_untried(gpus: list[int]) -> None:
    with lease.acquire({"gpu": lease.Request(1, ["gpu-0"])}, timeout_s=0):
        assert find_usable_cuda_devices(1) == [2]
        assert gpus == [1, 2]
        with pytest.raises(DeviceError, match=r"only 2 of 4 GPUs .* other runs: GPUs \[0, 1\]"):
            find_usable_cuda_devices(3)
        lease.acquire({"gpu": lease.Request(1, ["gpu-3"])}, timeout_s=0).close()  # nothing is kept of a failed choice


def test_gpus_without_strangers_come_first(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_names, "other_processes", lambda names: {"gpu-0": 2, "gpu-2": 0})
    assert find_usable_cuda_devices(1) == [2]
    assert find_usable_cuda_devices(3) == [0, 2, 3]  # usable all the same


def test_a_child_s_gpus_are_its_parent_s_lease(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_inherited", True)
    assert find_usable_cuda_devices(1) == [0]
    assert not list(lease.folder().glob("held-*"))


def test_without_a_place_for_locks_gpus_are_found_all_the_same(
    gpus: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "file" / "below"))
    assert find_usable_cuda_devices(2) == [0, 2]


class FakedNvml(ModuleType):
    """NVML of a machine with three GPUs; the second can't be read."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name == "GPU-b":
            raise self.NVMLError("Not Found")
        return name

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        pids = [os.getpid(), 1, 2] if handle == "GPU-a" else [os.getpid()]
        return [SimpleNamespace(pid=pid) for pid in pids]


def test_strangers_are_counted_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_names.other_processes(["GPU-a", "GPU-b", "GPU-c"]) == {"GPU-a": 2, "GPU-c": 0}
    assert nvml.open == 0


def test_without_nvml_nothing_is_known_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_names.other_processes(["GPU-a"]) == {}


def test_names_of_gpus_are_uuids_or_the_mask_s_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid{index}"))
    assert gpu_names.names(2) == ["GPU-uuid0", "GPU-uuid1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    assert gpu_names.names(1) == ["MIG-a"]

    def fails(index: int) -> None:
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,4")
    assert gpu_names.names(2) == ["gpu-5", "gpu-4"]


@pytest.mark.parametrize("number", [-2, True, False, 1.0, "1", None, [0]], ids=repr)
def test_a_number_of_usable_gpus_is_an_int(number: object) -> None:
    with pytest.raises(DeviceError, match=rf"num_devices={re.escape(repr(number))}: must be -1 for all usable GPUs"):
        find_usable_cuda_devices(number)  # type: ignore[arg-type]


def test_a_device_that_is_busy_takes_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(torch, "tensor", busy)
    assert not gpu_names._accepts_a_tensor(0)
    monkeypatch.setattr(torch, "tensor", lambda value, device: None)
    assert gpu_names._accepts_a_tensor(0)
