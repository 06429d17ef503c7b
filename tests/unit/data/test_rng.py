"""Random number generators: seeded together, captured as plain data, put back."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainloop._support import rng
from trainloop.errors import CheckpointError


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


@pytest.fixture(autouse=True)
def own_randomness() -> Any:
    before = rng.capture()
    yield
    rng.restore(before)


KINDS = [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def of_each_kind(request: pytest.FixtureRequest) -> Any:
    """numpy's global generator, which a program may replace."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(1))
    yield request.param
    np.random.set_bit_generator(before)


def test_a_seed_fixes_all_generators(of_each_kind: Any) -> None:
    for seed in (0, 2**63 - 1):
        rng.seed_all(seed)
        first = draw()
        assert draw() != first
        rng.seed_all(seed)
        assert draw() == first


def test_restored_generators_go_on_exactly(of_each_kind: Any) -> None:
    rng.seed_all(3)
    draw()  # an odd number of gaussians: each generator holds one back
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    rng.seed_all(4)
    rng.restore(state)
    assert [draw() for _ in range(3)] == expected


def test_state_is_plain_enough_for_a_checkpoint(of_each_kind: Any, tmp_path: Any) -> None:
    rng.seed_all(5)
    draw()
    torch.save(rng.capture(), tmp_path / "state.pt")
    expected = draw()
    rng.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected


@pytest.mark.parametrize("now", KINDS)
def test_a_restored_state_brings_its_kind_of_numpys_generator(of_each_kind: Any, now: Any) -> None:
    """A script that resumes may not have set it."""
    state = rng.capture()
    expected = draw()
    np.random.set_bit_generator(now(2))
    rng.restore(state)
    assert type(np.random.get_bit_generator()) is of_each_kind
    assert draw() == expected


def test_a_state_of_a_bit_generator_that_is_none_of_numpys_is_refused() -> None:
    state = rng.capture()
    state["numpy"] = {"bit_generator": "Xoshiro256", "state": {"s": 1}, "has_gauss": 0, "gauss": 0.0}
    with pytest.raises(CheckpointError, match=r"Xoshiro256, which is not one of numpy's own.*set_bit_generator\(Xosh"):
        rng.restore(state)


def test_isolated_leaves_no_trace(of_each_kind: Any) -> None:
    rng.seed_all(6)
    expected = [draw(), draw()]
    rng.seed_all(6)
    first = draw()
    with rng.isolated():
        draw()
    with rng.isolated(1):
        inside = draw()
    with pytest.raises(ValueError, match="inside"), rng.isolated(1):
        assert draw() == inside
        raise ValueError("inside")
    assert [first, draw()] == expected


def test_states_without_those_of_python_and_numpy_restore_only_torch() -> None:
    """What a feed reads at the beginning of an epoch whose order only torch draws, and a checkpoint has of it."""
    rng.seed_all(3)
    own = rng.read(only_torch=True)
    captured = own.captured()
    first = torch.rand(2).tolist()
    outside = [random.random(), float(np.random.rand())]
    rng.restore(captured)
    assert torch.rand(2).tolist() == first
    assert [random.random(), float(np.random.rand())] != outside
    assert captured["python"] is None


def test_a_normal_number_that_numpy_has_kept_is_kept_around_a_block() -> None:
    np.random.seed(4)
    expected = np.random.randn(3).tolist()
    np.random.seed(4)
    drawn = [float(np.random.randn())]
    with rng.isolated():
        np.random.randn(4)
    drawn += [float(np.random.randn()) for _ in range(2)]
    assert drawn == expected


def test_peeking_changes_nothing_and_depends_on_the_state() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    seed = rng.peek_seed()
    assert torch.equal(torch.get_rng_state(), state)
    assert rng.peek_seed() == seed
    torch.rand(())
    assert rng.peek_seed() != seed
    assert 0 <= seed < 2**63


@given(st.lists(st.one_of(st.integers(), st.text()), max_size=4))
def test_derived_seeds_are_in_range_and_repeatable(parts: list[Any]) -> None:
    seed = rng.derive_seed(*parts)
    assert 0 <= seed < 2**63
    assert rng.derive_seed(*parts) == seed


def test_derived_seeds_differ_in_every_part() -> None:
    many = [(seed, kind, rank) for seed in range(10) for kind in ("order", "rank") for rank in range(10)]
    assert len({rng.derive_seed(*parts) for parts in many}) == len(many)
    assert rng.derive_seed(1, 23) != rng.derive_seed(12, 3)
    assert rng.derive_seed("1") != rng.derive_seed(1)


@pytest.mark.gpu
def test_generators_of_gpus_go_along() -> None:
    torch.rand((), device="cuda")
    state = rng.capture()
    expected = torch.rand(3, device="cuda").tolist()
    rng.restore(state)
    assert torch.rand(3, device="cuda").tolist() == expected


def test_states_of_an_earlier_version_are_left_out_with_a_warning() -> None:
    rng.seed_all(3)
    expected = draw()
    rng.seed_all(3)
    with pytest.warns(UserWarning, match="format of an earlier version.*different random numbers"):
        rng.restore({"seed": 1, "packed": torch.zeros(3, dtype=torch.uint8)})
    with pytest.warns(UserWarning, match="format of an earlier version"):
        rng.restore({"seed": 1, "torch": torch.get_rng_state()})
    assert draw() == expected


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: plain(part) for name, part in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(part) for part in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def test_snapshots_notice_each_draw_of_a_program_that_draws_often() -> None:
    snapshots = rng.Snapshots()
    gauss = partial(random.gauss, 0, 1)  # Python 3.10 has no defaults
    draws = np.random.randn, np.random.randn, random.random, gauss, gauss, np.random.rand
    for draw in (*draws, lambda: torch.rand(1)):
        draw()
        before = rng.capture(devices=False)
        assert plain(snapshots.take().captured()) == plain(before)
        assert snapshots.unread() == 0


def test_generators_that_stand_still_are_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = random.getstate
    monkeypatch.setattr(random, "getstate", lambda: reads.append(1) or real())
    snapshots, period = rng.Snapshots(), rng.Snapshots.PERIOD
    for _ in range(10 * period):
        snapshots.take()
    assert len(reads) == period + 9  # the first hundred, then each hundredth
    assert snapshots.unread() == 0
    random.random()
    assert snapshots.unread() == period - 1
    snapshots.take()  # the next hundredth
    assert snapshots.unread() == 0
    np.random.rand()
    snapshots.take()  # since the last one changed, each is read again
    assert plain(snapshots.take().captured()) == plain(rng.capture(devices=False))
