"""Orders and shares as arithmetic: tables, properties, and the uniformity of the shuffled order."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainloop._support.sharding import (
    BatchPlan,
    IdentityOrder,
    PermutedOrder,
    StepWeights,
    index_blocks,
    shard_size,
    weigh_step,
)

LARGE = PermutedOrder.SORTED_UP_TO + 1  # the first length that is permuted by a Feistel network


@pytest.mark.parametrize(
    ("total", "world_size", "sizes"),
    [(10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1, 0]), (0, 2, [0, 0]), (8, 2, [4, 4]), (5, 1, [5])],
)
def test_shard_sizes(total: int, world_size: int, sizes: list[int]) -> None:
    assert [shard_size(total, rank, world_size) for rank in range(world_size)] == sizes
    assert sizes == [len(range(rank, total, world_size)) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        pytest.param(BatchPlan(10, 2, 2), [(2, 2), (2, 2), (1, 1)], id="short last"),
        pytest.param(BatchPlan(9, 2, 2), [(2, 2), (2, 2), (1, None)], id="empty last share"),
        pytest.param(BatchPlan(10, 2, 2, drop_last=True), [(2, 2), (2, 2)], id="drop_last"),
        pytest.param(BatchPlan(8, 2, 2), [(2, 2), (2, 2)], id="even"),
        pytest.param(BatchPlan(1, 4, 3), [(1, None, None)], id="one sample"),
        pytest.param(BatchPlan(0, 4, 3), [], id="none"),
        pytest.param(BatchPlan(7, 3, 1), [(3,), (3,), (1,)], id="one rank"),
    ],
)
def test_plans(plan: BatchPlan, shares: list[tuple[int | None, ...]]) -> None:
    assert [plan.shares(index) for index in range(plan.num_batches)] == shares
    assert plan.num_taken == sum(size or 0 for sizes in shares for size in sizes)


@given(
    num_samples=st.integers(0, 300),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    first_batch=st.integers(0, 12),
    block=st.integers(1, 50),
)
def test_every_sample_is_in_one_share(
    num_samples: int, batch_size: int, world_size: int, drop_last: bool, first_batch: int, block: int
) -> None:
    plan = BatchPlan(num_samples, batch_size, world_size, drop_last)
    order = PermutedOrder(num_samples, key=1)
    ranks = [
        [int(i) for indices in index_blocks(order, plan, rank, first_batch, block) for i in indices]
        for rank in range(world_size)
    ]
    start = first_batch * plan.global_batch_size
    expected = order.at(np.arange(start, plan.num_taken)).tolist()
    assert sorted(i for rank in ranks for i in rank) == sorted(expected)
    for rank, mine in enumerate(ranks):
        shares = [plan.shares(index)[rank] or 0 for index in range(first_batch, plan.num_batches)]
        assert len(mine) == sum(shares)
        # Each batch of a rank lies in its global batch.
        for index, share in enumerate(shares):
            batch, mine = mine[:share], mine[share:]
            assert set(batch) <= set(expected[index * plan.global_batch_size : (index + 1) * plan.global_batch_size])


@given(world_size=st.sampled_from([1, 2, 3, 4, 6, 12]), num_samples=st.integers(1, 100))
def test_global_batches_do_not_depend_on_the_number_of_ranks(world_size: int, num_samples: int) -> None:
    order = PermutedOrder(num_samples, key=5)
    plan = BatchPlan(num_samples, 12 // world_size, world_size)
    for index in range(plan.num_batches):
        batch = []
        for rank in range(world_size):
            start, stop, step = plan.positions(rank, index, 1)
            batch += order.at(np.arange(start, stop, step)).tolist()
        assert sorted(batch) == sorted(order.at(np.arange(12 * index, min(12 * (index + 1), num_samples))).tolist())


# -- orders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 64, 1000, LARGE - 1, LARGE, 20_011, 65_536, 65_537, 200_003])
def test_an_order_is_a_permutation(length: int) -> None:
    indices = PermutedOrder(length, key=7).at(np.arange(length))
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(length))


@settings(max_examples=50)
@given(key=st.integers(-(2**70), 2**70), length=st.sampled_from([50, LARGE, 2**40 + 7, 2**63 - 1]), data=st.data())
def test_an_order_can_be_read_anywhere(key: int, length: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    indices = PermutedOrder(length, key).at(positions)
    assert ((indices >= 0) & (indices < length)).all()
    assert len(set(indices.tolist())) == len(set(positions.tolist()))
    for position, index in zip(positions, indices, strict=True):
        assert PermutedOrder(length, key).at(np.array([position])) == index


def test_an_order_stays_what_it_is() -> None:
    # A checkpoint of an earlier version goes on with the order it began.
    assert PermutedOrder(10, key=3).at(np.arange(10)).tolist() == [1, 9, 4, 0, 6, 3, 8, 5, 7, 2]
    assert PermutedOrder(10**10, key=3).at(np.arange(4) + 9 * 10**9).tolist() == [
        3676493288,
        5203831247,
        1451068878,
        8960181164,
    ]


def test_identity_order() -> None:
    assert len(IdentityOrder(5)) == 5
    assert IdentityOrder(5).at(np.array([3, 1])).tolist() == [3, 1]


# -- uniformity --------------------------------------------------------------------------------------------------------


def chi_square_is_plausible(counts: np.ndarray, expected: float) -> bool:
    """Whether counts could be of a uniform draw: within 5 standard deviations of chi-square's mean, to both sides."""
    freedom = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_small_permutations_are_equally_likely(length: int) -> None:
    keys = 3000
    counts = dict.fromkeys(permutations(range(length)), 0)
    for key in range(keys):
        counts[tuple(PermutedOrder(length, key).at(np.arange(length)).tolist())] += 1
    assert chi_square_is_plausible(np.array(list(counts.values())), keys / len(counts))


@pytest.mark.parametrize(
    ("position", "length"),
    [
        # Each position, and each length; all pairs of them in make test-all.
        pytest.param(position, length, marks=[pytest.mark.slow] if (i + j) % 3 else [])
        for i, position in enumerate(["first", "middle", "last"])
        for j, length in enumerate([97, LARGE, 2**20 - 3, 10**10])
    ],
)
def test_every_position_is_uniform(length: int, position: str) -> None:
    where = {"first": 0, "middle": length // 2, "last": length - 1}[position]
    bins, keys = 97, 2000
    indices = np.concatenate([PermutedOrder(length, key).at(np.array([where])) for key in range(keys)])
    # A Python int: bins * 10**10 fits, but the test should not have to know.
    counts = np.bincount([int(i) * bins // length for i in indices], minlength=bins)
    assert chi_square_is_plausible(counts, keys / bins)


@pytest.mark.parametrize("length", [LARGE, 2**20 - 3, 2**20, 10**10])
def test_neighbours_are_independent(length: int) -> None:
    bins, pairs = 32, 60_000
    for key in range(3):
        start = 12_345 if length > pairs else 0
        indices = PermutedOrder(length, key).at(np.arange(start, min(length, start + pairs)))
        cells = (indices * bins // length).astype(np.int64)
        joint = np.bincount(cells[:-1] * bins + cells[1:], minlength=bins * bins)
        assert chi_square_is_plausible(joint, (len(indices) - 1) / bins**2)
        # Low bits as well, where a weak network shows first.
        low = indices % bins
        joint = np.bincount(low[:-1] * bins + low[1:], minlength=bins * bins)
        assert chi_square_is_plausible(joint, (len(indices) - 1) / bins**2)


def test_steps_between_neighbours_are_spread() -> None:
    indices = PermutedOrder(2**20 - 3, key=1).at(np.arange(100_000))
    steps = np.diff(indices) % (2**20 - 3)
    counts = np.bincount(steps * 64 // (2**20 - 3), minlength=64)
    assert chi_square_is_plausible(counts, len(steps) / 64)


def test_keys_give_unrelated_orders() -> None:
    orders = [PermutedOrder(LARGE, key).at(np.arange(5000)) for key in (1, 2)]
    # Two independent permutations agree at about one position in LARGE.
    assert (orders[0] == orders[1]).sum() < 8
    both = np.bincount((orders[0] * 16 // LARGE) * 16 + orders[1] * 16 // LARGE, minlength=256)
    assert chi_square_is_plausible(both, 5000 / 256)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        pytest.param([[4], [4]], StepWeights(None, 8, None), id="equal"),
        pytest.param([[4, 4], [4, 4]], StepWeights(None, 16, None), id="equal, accumulated"),
        pytest.param([[3], [1]], StepWeights([1.5], 4, None), id="unequal"),
        pytest.param([[4, 2], [4]], StepWeights([0.8, 0.4], 10, [2, 1]), id="ragged"),
        pytest.param([[4], [4, 4]], StepWeights([4 * 2 / 12], 12, [1, 2]), id="ragged and equal"),
        pytest.param([[], [2]], StepWeights([], 2, [0, 1]), id="none here"),
        pytest.param([[0], [0]], StepWeights(None, 0, None), id="empty batches"),
        pytest.param([[0], [], []], StepWeights([0.0], 0, [1, 0, 0]), id="an empty batch on one rank"),
        pytest.param([[4, 2]], StepWeights([4 / 6, 2 / 6], 6, None), id="one rank"),
    ],
)
def test_weights_of_the_first_rank(sizes: list[list[int]], weights: StepWeights) -> None:
    scales, *rest = weigh_step(sizes, rank=0)
    assert scales == (None if weights.scales is None else pytest.approx(weights.scales))
    assert rest == list(weights[1:])


@given(st.lists(st.lists(st.integers(1, 50), max_size=4), min_size=1, max_size=4).filter(any))
def test_the_mean_over_ranks_counts_every_sample_once(sizes: list[list[int]]) -> None:
    generator = np.random.default_rng(0)
    losses = [[generator.random(size) for size in of_rank] for of_rank in sizes]
    mean = 0.0
    for rank, of_rank in enumerate(losses):
        scales, total, counts = weigh_step(sizes, rank)
        assert total == sum(map(sum, sizes))
        assert counts == (list(map(len, sizes)) if len({len(of) for of in sizes}) > 1 else None)
        factors = [1 / len(of_rank)] * len(of_rank) if scales is None else scales
        mean += sum(f * loss.mean() for f, loss in zip(factors, of_rank, strict=True)) / len(sizes)
    assert mean == pytest.approx(np.concatenate([loss for of_rank in losses for loss in of_rank]).mean())
