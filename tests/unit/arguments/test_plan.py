"""Plans and placements: the specification's tables, written out, and the properties that hold for all."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainloop.errors import ResourceError
from trainloop.resources import Plan, ResourceQuota, Resources, hold, place, plan
from trainloop.resources.quota import exact

Q = ResourceQuota


# -- the table -------------------------------------------------------------------------------------------------------


def facts(p: Plan) -> tuple[object, ...]:
    return (
        *(p.trials_in_parallel, p.folds_in_parallel, p.models_in_parallel),
        *((p.cpus_granted, p.gpus_granted), (p.cpus_used, p.gpus_used)),
        p.waves,
    )


TABLE = [
    pytest.param(
        Q(32, 4),
        {"num_trials": 2, "num_bag_folds": 2, "per_bag": Q(10, 2), "per_model": Q(4, 0.5)},
        (2, 2, 4, (20, 4), (16, 2), 1),
        id="the documented example",
    ),
    pytest.param(
        Q(32, 4),
        {"num_trials": 8, "num_bag_folds": 2, "per_bag": Q(10, 2), "per_model": Q(4, 0.5)},
        (2, 2, 4, (20, 4), (16, 2), 4),
        id="8 trials in 4 waves",
    ),
    pytest.param(
        Q(16, 4),
        {"num_bag_folds": 8, "per_model": Q(2, 1)},
        (1, 4, 4, (16, 4), (8, 4), 2),
        id="8 folds of one GPU",
    ),
    pytest.param(Q(8, 1), {"num_trials": 4}, (4, 1, 4, (8, 1), (8, 1), 1), id="nothing given"),
    pytest.param(
        Q(8, 2),
        {"num_trials": 2, "num_bag_folds": 4, "per_bag": Q(4, 1), "per_model": Q(num_gpus=0.5)},
        (2, 2, 4, (8, 2), (8, 2), 2),
        id="half a GPU a model",
    ),
    pytest.param(
        Q(8, 2),
        {"num_trials": 2, "num_bag_folds": 4, "per_bag": Q(4, 1)},
        (2, 4, 8, (8, 2), (8, 2), 1),
        id="a model's share derived",
    ),
    pytest.param(
        Q(16, 4),
        {"num_bag_folds": 8, "per_model": Q(2, 1), "parallel_folds": False},
        (1, 1, 1, (2, 1), (2, 1), 8),
        id="folds one after the other",
    ),
    pytest.param(
        Q(8, 2), {"num_trials": 2, "num_bag_folds": 8}, (1, 8, 8, (8, 2), (8, 2), 2), id="folds first, then trials"
    ),
    pytest.param(
        Q(4, 0), {"num_trials": 3, "num_bag_folds": 8}, (1, 4, 4, (4, 0), (4, 0), 6), id="more folds than CPUs"
    ),
    pytest.param(
        Q(8, 2), {"num_trials": 8, "per_model": Q(num_gpus=0)}, (8, 1, 8, (8, 0), (8, 0), 1), id="0 pins only the GPUs"
    ),
    pytest.param(
        Q(8, 0, "8GiB"),
        {"num_trials": 8, "num_bag_folds": 2, "per_model": Q(1, memory="2GiB")},
        (2, 2, 4, (4, 0), (4, 0), 4),
        id="memory binds trials",
    ),
    pytest.param(
        Q(8, 0, "8GiB"),
        {"num_bag_folds": 8, "per_bag": Q(8, 0, "4GiB"), "per_model": Q(1, memory="1.5GiB")},
        (1, 2, 2, (8, 0), (2, 0), 4),
        id="memory binds folds",
    ),
    pytest.param(
        Q(8, 3),
        {"num_trials": 4, "num_bag_folds": 3, "per_bag": Q(4, 1.5), "per_model": Q(1, 0.5)},
        (2, 3, 6, (8, 3), (6, 3), 2),
        id="a bag of one and a half",
    ),
    pytest.param(
        Q(16, 2), {"num_trials": 4, "per_model": Q(2, 0.6)}, (2, 1, 2, (4, 1.2), (4, 1.2), 2), id="no share straddles"
    ),
    pytest.param(Q(8, 2), {"num_trials": 3}, (3, 1, 3, (6, 2), (6, 1.5), 1), id="2 GPUs over 3 trials"),
    pytest.param(
        Q(64, 5),
        {"num_trials": 9, "num_bag_folds": 2, "per_bag": Q(2, 1.6), "per_model": Q(1, 0.6)},
        (2, 2, 4, (4, 3.2), (4, 2.4), 5),
        id="three bags fit, six models do not",
    ),
    pytest.param(
        Q(16, 4),
        {"num_trials": 9, "num_bag_folds": 4, "per_bag": Q(num_gpus=1), "per_model": Q(2, 0.5)},
        (4, 2, 8, (16, 4), (16, 4), 6),
        id="a bag's CPUs derived from its models",
    ),
    pytest.param(Q(1, 0), {}, (1, 1, 1, (1, 0), (1, 0), 1), id="the least"),
    pytest.param(Q(3, 1), {"num_trials": 2}, (2, 1, 2, (2, 1), (2, 1), 1), id="CPUs do not divide"),
]


@pytest.mark.parametrize("total, request_, expected", TABLE)
def test_plans(total: ResourceQuota, request_: dict[str, object], expected: tuple[object, ...]) -> None:
    p = plan(total, **request_)  # type: ignore[arg-type]
    assert facts(p) == expected
    assert p == plan(total, **request_)  # type: ignore[arg-type]


def test_shares_of_the_documented_plans() -> None:
    p = plan(Q(8, 1), num_trials=4)
    assert p.per_bag == p.per_model == Q(2, 0.25)
    assert p.placement == ((0,), (0,), (0,), (0,))
    p = plan(Q(8, 2), num_trials=2, num_bag_folds=4, per_bag=Q(4, 1))
    assert (p.per_bag, p.per_model) == (Q(4, 1), Q(1, 0.25))
    p = plan(Q(8, 2), num_trials=2, num_bag_folds=4, per_bag=Q(4, 1), per_model=Q(num_gpus=0.5))
    assert (p.per_bag, p.per_model) == (Q(4, 1), Q(2, 0.5))
    assert p.placement == ((0,), (0,), (1,), (1,))
    p = plan(Q(8, 0, "8GiB"), num_trials=2, num_bag_folds=2)
    assert (p.per_bag, p.per_model) == (Q(4, 0, "4GiB"), Q(2, 0, "2GiB"))


def test_a_plan_prints_its_levels() -> None:
    text = str(plan(Q(32, 4), num_trials=8, num_bag_folds=2, per_bag=Q(10, 2), per_model=Q(4, 0.5, "2GiB")))
    assert text.splitlines() == [
        "        at once    of   CPUs     GPUs  memory",
        "run           1     1     32        4  auto",
        "trial         2     8     10        2  auto",
        "model         4    16      4      0.5  2 GiB",
        "granted 20 CPUs, 4 GPUs; used 16 CPUs, 2 GPUs; waves: 4",
    ]


def test_the_machine_itself_may_be_the_total() -> None:
    machine = Resources(num_cpus=8, num_gpus=2, memory=16 * 2**30)
    p = plan(machine, num_trials=2)
    assert p.per_model == Q(4, 1)  # that a machine's memory ends does not limit a model
    p = plan(machine, num_trials=4, per_model=Q(memory="8GiB"))
    assert (p.trials_in_parallel, p.per_model) == (2, Q(4, 1, "8GiB"))
    with pytest.raises(ResourceError, match="per_model memory="):
        plan(machine, per_model=Q(memory="17GiB"))


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED = [
    (Q(8, 1), {"num_bag_folds": 2, "per_bag": Q(10, 1)}, r"per_bag num_cpus=10 is more than num_cpus=8 .* total"),
    (Q(8, 0), {"per_model": Q(1, 0.5)}, r"per_model num_gpus=0.5 is more than num_gpus=0 .*total \(no GPU granted\)"),
    (
        Q(8, 4),
        {"num_bag_folds": 2, "per_bag": Q(4, 1), "per_model": Q(5)},
        r"per_model num_cpus=5 is more than num_cpus=4 of its parent, per_bag",
    ),
    (
        Q(8, 4),
        {"num_bag_folds": 2, "per_bag": Q(4, 1), "per_model": Q(1, 2)},
        r"per_model num_gpus=2 is more than num_gpus=1 of its parent, per_bag",
    ),
    (Q(8, 4), {"num_bag_folds": 2, "per_bag": Q(4, 4.5)}, r"per_bag num_gpus=4.5 is more than num_gpus=4"),
    (Q(8, 4), {"num_bag_folds": 2, "per_bag": Q(4), "per_model": Q(num_gpus=5)}, r"per_model num_gpus=5 .* total"),
    (
        Q(8, 4, "1GiB"),
        {"per_model": Q(1, memory="2GiB")},
        r"per_model memory=2147483648 is more than memory=1073741824",
    ),
    (Q(8, 4), {"per_model": Q(1, 1.5)}, r"per_model num_gpus=1.5: one model can use a fraction .* Use 1 or 2"),
    (Q(8), {"per_model": Q(1, 0.5)}, r"per_model num_gpus=0.5 is more than num_gpus=0 .*no GPU granted"),
    (Q(num_gpus=1), {}, "needs a number of CPUs"),
    (Q(), {}, r"available\(\)"),
    (None, {}, "needs a number of CPUs"),
    (8, {}, "total=8: must be a ResourceQuota"),
    ({"num_cpus": 8}, {}, "must be a ResourceQuota"),
    (Q(8, 1), {"per_model": {"num_cpus": 1}}, "per_model=.*must be a ResourceQuota"),
    (Q(8, 1), {"num_bag_folds": 2, "per_bag": 4}, "per_bag=4: must be a ResourceQuota"),
    *((Q(8, 1), {"parallel_folds": x}, "parallel_folds=.*True or False") for x in ("no", 1, None)),
    *((Q(8, 1), {"num_trials": n}, "num_trials=.*an int of 1 or more") for n in (0, -1, True, 1.0, "2", None)),
    *((Q(8, 1), {"num_bag_folds": n}, "num_bag_folds=.*an int of 0 or more") for n in (-1, False, 2.0, "2", None)),
]


@pytest.mark.parametrize("total, request_, what", REFUSED)
def test_what_cannot_be_granted_is_refused(total: object, request_: dict[str, object], what: str) -> None:
    with pytest.raises(ResourceError, match=what):
        plan(total, **request_)  # type: ignore[arg-type]


@pytest.mark.parametrize("folds", [0, 1])
def test_without_bagging_the_bag_s_share_is_ignored_unvalidated_with_one_warning(folds: int) -> None:
    with pytest.warns(UserWarning, match=f"per_bag is ignored: with num_bag_folds={folds}") as caught:
        p = plan(Q(8, 1), num_trials=4, num_bag_folds=folds, per_bag="nonsense")  # type: ignore[arg-type]
    assert len(caught) == 1
    assert facts(p) == facts(plan(Q(8, 1), num_trials=4))


def test_gpus_that_are_not_given_are_none() -> None:
    assert plan(Q(8), num_trials=2) == plan(Q(8, 0), num_trials=2)
    assert plan(Q(8, memory="1GiB")).total == Q(8, 0, "1GiB")


@pytest.mark.parametrize(
    "cpus, trials, folds, parallel, waves",
    [
        pytest.param(2, 4, 3, True, 8, id="each trial two waves of folds"),
        pytest.param(2, 1, 3, True, 2, id="there is no next trial"),
        pytest.param(4, 3, 3, True, 3, id="one fold left over"),
        pytest.param(2, 5, 2, False, 6, id="a trial's folds one after the other"),
        pytest.param(1, 2, 3, True, 6, id="one CPU"),
    ],
)
def test_waves_are_trials_times_folds(cpus: int, trials: int, folds: int, parallel: bool, waves: int) -> None:
    assert plan(Q(cpus), num_trials=trials, num_bag_folds=folds, parallel_folds=parallel).waves == waves


# -- properties ------------------------------------------------------------------------------------------------------

cpus = st.one_of(st.just("auto"), st.integers(1, 40))
parts = [0, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.5, 0.6, 0.75, 0.9, 1]
model_gpus = st.one_of(st.just("auto"), st.sampled_from(parts), st.integers(1, 5))
bag_gpus = st.one_of(model_gpus, st.sampled_from([1.2, 1.5, 1.6, 2.25, 3.5]))
memory = st.one_of(st.just("auto"), st.integers(1, 64).map(lambda n: n * 2**20))
totals = st.builds(Q, st.integers(1, 64), st.one_of(st.integers(0, 9), st.sampled_from([0.5, 1.5, 2.4, 4.8])), memory)
requests = st.fixed_dictionaries(
    {
        "num_trials": st.integers(1, 20),
        "num_bag_folds": st.integers(2, 10),
        "per_bag": st.one_of(st.none(), st.builds(Q, cpus, bag_gpus, memory)),
        "per_model": st.one_of(st.none(), st.builds(Q, cpus, model_gpus, memory)),
        "parallel_folds": st.booleans(),
    }
)


def planned(total: ResourceQuota, request_: dict[str, object]) -> Plan | None:
    try:
        return plan(total, **request_)  # type: ignore[arg-type]
    except ResourceError:
        return None


@given(totals, requests)
@settings(max_examples=150)
def test_children_never_exceed_their_parent_and_all_that_runs_has_a_place(
    total: ResourceQuota, request_: dict[str, object]
) -> None:
    p = planned(total, request_)
    assume(p is not None)
    assert p is not None
    run, bag, model = p.total, p.per_bag, p.per_model
    n, folds = p.trials_in_parallel, p.folds_in_parallel
    assert 1 <= n <= p.num_trials
    assert 1 <= folds <= p.num_folds
    # used <= granted <= total, at every level, exactly
    assert n * bag.num_cpus <= run.num_cpus  # type: ignore[operator]
    assert folds * model.num_cpus <= bag.num_cpus  # type: ignore[operator]
    assert n * exact(bag.num_gpus) <= exact(run.num_gpus)
    assert folds * exact(model.num_gpus) <= exact(bag.num_gpus)
    assert p.cpus_used <= p.cpus_granted <= total.num_cpus  # type: ignore[operator]
    assert p.gpus_used <= p.gpus_granted <= total.num_gpus  # type: ignore[operator]
    if total.memory != "auto":
        assert folds * model.memory <= bag.memory  # type: ignore[operator]
        assert n * bag.memory <= run.memory  # type: ignore[operator]
    # what was given is what is granted
    for given_, share in ((request_["per_bag"], bag), (request_["per_model"], model)):
        for name in ("num_cpus", "num_gpus", "memory"):
            if given_ is not None and getattr(given_, name) != "auto":
                assert getattr(share, name) == getattr(given_, name)
    # nothing is placed twice, and no device is over what the run has of it
    loads: Counter[int] = Counter()
    share = exact(model.num_gpus)
    for devices in p.placement:
        assert len(devices) == len(set(devices)) == math.ceil(share)
        for device in devices:
            loads[device] += min(share, Fraction(1))  # type: ignore[assignment]
    assert len(p.placement) == p.models_in_parallel
    have = exact(total.num_gpus)
    assert all(load <= min(Fraction(1), have - device) for device, load in loads.items())
    assert p.waves == math.ceil(p.num_trials / n) * math.ceil(p.num_folds / folds)


@given(totals, requests, st.integers(0, 20), st.integers(0, 4), st.integers(0, 20), st.integers(0, 10))
@settings(max_examples=150)
def test_more_is_never_refused_where_less_fits(
    total: ResourceQuota, request_: dict[str, object], cpus: int, gpus: int, trials: int, folds: int
) -> None:
    """More of the machine, more trials, more folds: what ran before still runs, as many models at once or more."""
    p = planned(total, request_)
    assume(p is not None)
    assert p is not None
    more = Q(total.num_cpus + cpus, exact(total.num_gpus) + gpus, total.memory)  # type: ignore[operator, arg-type]
    grown = planned(more, request_)
    assert grown is not None
    assert grown.trials_in_parallel >= p.trials_in_parallel
    wider = {**request_, "num_trials": request_["num_trials"] + trials}  # type: ignore[operator]
    assert planned(total, wider) is not None
    assert planned(total, {**request_, "num_bag_folds": request_["num_bag_folds"] + folds}) is not None  # type: ignore[operator]


def test_a_trial_has_as_many_folds_at_once_as_it_would_have_alone() -> None:
    """Folds come first. Two trials of one fold each took the place of one trial of two folds, depending on the GPUs."""
    for gpus, trials in ((2.4, 1), (3.4, 1), (4.4, 2)):
        p = plan(Q(4, gpus), num_trials=2, num_bag_folds=3, per_model=Q(num_gpus=0.6))
        assert (p.trials_in_parallel, p.folds_in_parallel) == (trials, 2), gpus


@pytest.mark.parametrize("n", range(1, 65))
def test_n_models_of_one_nth_fit_one_gpu_exactly_and_no_more(n: int) -> None:
    for share in (1 / n, Fraction(1, n), 1 - (n - 1) / n):
        assert hold(Fraction(1), exact(share)) == n
        p = plan(Q(100, 1), num_trials=n + 1, per_model=Q(1, share))
        assert (p.trials_in_parallel, p.gpus_used) == (n, 1)
        assert place([share] * n, 1) == [[0]] * n
        with pytest.raises(ResourceError):
            place([share] * (n + 1), 1)
        derived = plan(Q(100, 1), num_trials=n).per_model.num_gpus
        assert place([derived] * n, 1) == [[0]] * n


@pytest.mark.parametrize(
    "total, share, expected",
    [(2, 0.6, 2), (1, 0.1, 10), (0.3, 0.1, 3), (4, 2, 2), (3, 1.5, 2), (1.5, 0.6, 1), (2.5, 0.5, 5), (0, 0.5, 0)],
)
def test_hold(total: float, share: float, expected: int) -> None:
    assert hold(exact(total), exact(share)) == expected


def test_no_gpu_is_needed_by_any_number_of_models_without() -> None:
    assert hold(Fraction(0), Fraction(0)) > 10**6


# -- place -----------------------------------------------------------------------------------------------------------

PLACED = [
    ([], 0, []),
    ([0, 0], 0, [[], []]),
    ([0.5, 0.5], 1, [[0], [0]]),
    ([0.5] * 4, 2, [[0], [0], [1], [1]]),
    ([0.6, 0.6], 2, [[0], [1]]),
    ([0.4, 0.4, 0.3, 0.3, 0.3, 0.3], 2, [[0], [1], [0], [0], [1], [1]]),
    ([0.3, 0.4, 0.3, 0.4, 0.3, 0.3], 2, [[0], [0], [0], [1], [1], [1]]),
    ([1, 0.5, 0.5], 4, [[0], [1], [1]]),
    ([0.5, 1, 0.5], 2, [[0], [1], [0]]),
    ([2, 1], 3, [[0, 1], [2]]),
    ([0.5, 2, 0.25], 8, [[0], [1, 2], [0]]),
    ([0.2, 0, 0.9], 2, [[0], [], [1]]),
    ([0.1] * 10, 5, [[0]] * 10),
    ([1 / 3] * 4, 2, [[0], [0], [0], [1]]),
    ([0.5, 0.5], 64, [[0], [0]]),
]


@pytest.mark.parametrize("fractions, num_gpus, expected", PLACED)
def test_placements(fractions: list[float], num_gpus: int, expected: list[list[int]]) -> None:
    assert place(fractions, num_gpus) == expected
    assert place(fractions, num_gpus) == expected


@pytest.mark.parametrize(
    "fractions, num_gpus, what",
    [
        (
            [0.6] * 3,
            2,
            "3 models with 0.6, 0.6, 0.6 GPUs do not fit on 2 devices, because a fraction is never split",
        ),
        ([0.1], 0, "1 model with 0.1 GPUs do not fit on 0 devices"),
        ([2], 1, "do not fit on 1 device"),
        ([1, 0.01], 1, "do not fit on 1 device"),
        ([0.4, 0.4, 0.4, 0.3, 0.3, 0.3], 2, "do not fit on 2 devices"),
        ([0.334] * 3, 1, "do not fit"),
        ([1.5], 4, "num_gpus=1.5: one model can use a fraction of one GPU"),
        ([-0.5], 1, "num_gpus=-0.5: must be a finite number"),
        ([True], 1, "num_gpus=True"),
        (["0.5"], 1, "num_gpus='0.5'"),
        ([math.nan], 1, "num_gpus=nan"),
        (0.5, 1, "place: fractions=0.5: must be a list of numbers"),
        ("0.5", 1, "place: fractions='0.5': must be a list of numbers"),
        ([0.5], -1, "num_gpus=-1: must be an int"),
        ([0.5], True, "num_gpus=True: must be an int"),
        ([0.5], 1.0, "num_gpus=1.0: must be an int"),
    ],
)
def test_what_has_no_place_is_refused(fractions: list[float], num_gpus: int, what: str) -> None:
    with pytest.raises(ResourceError, match=what):
        place(fractions, num_gpus)


def fits_by_trying_all(sizes: list[int], bins: int, full: int) -> bool:
    return any(
        all(sum(s for s, b in zip(sizes, into) if b == device) <= full for device in range(bins))
        for into in itertools.product(range(bins), repeat=len(sizes))
    )


@given(st.lists(st.integers(1, 10), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=150)
def test_an_assignment_that_exists_is_found_on_the_fewest_devices(tenths: list[int], num_gpus: int) -> None:
    fractions = [tenth / 10 for tenth in tenths]
    if not fits_by_trying_all(tenths, num_gpus, 10):
        with pytest.raises(ResourceError):
            place(fractions, num_gpus)
        return
    placed = place(fractions, num_gpus)
    used = {device for devices in placed for device in devices}
    assert used == set(range(len(used)))
    assert len(used) == 1 or not fits_by_trying_all(tenths, len(used) - 1, 10)
    for device in used:
        assert sum(tenth for tenth, devices in zip(tenths, placed) if device in devices) <= 10


@given(st.data())
@settings(max_examples=60)
def test_sixteen_requests_that_were_cut_from_whole_devices_fit_them_in_any_order(data: st.DataObject) -> None:
    num_gpus = data.draw(st.integers(1, 6))
    cuts = data.draw(st.lists(st.integers(1, 999), min_size=16 - num_gpus, max_size=16 - num_gpus, unique=True))
    pieces: list[Fraction] = []
    for device in range(num_gpus):
        own = [0, *sorted(cuts[device::num_gpus]), 1000]
        pieces += [Fraction(b - a, 1000) for a, b in itertools.pairwise(own)]
    assert len(pieces) == 16
    shuffled = data.draw(st.permutations(pieces))
    placed = place(shuffled, num_gpus)
    loads: Counter[int] = Counter()
    for piece, devices in zip(shuffled, placed):
        loads[devices[0]] += piece  # type: ignore[assignment]
    assert all(load == 1 for load in loads.values())


# Shares of 12 whole devices, which first fit fills as well.
HARD = """
    0.2106318 0.1935807 0.2367101 0.115346 0.2056168 0.3811434 0.1253761 0.4132397 0.1925777 0.6058174 0.4994984
    0.1975927 0.454363 0.4744232 0.7041123 0.5667001 0.3069207 0.2698094 0.4884653 0.335005 0.0371113 0.2647943
    0.1644934 0.1965897 0.3861584 0.0310935 0.3179538 0.4603811 0.4262788 0.4222668 0.6328986 0.1614844 0.3029087
"""


def test_many_unequal_requests_stand_on_devices_that_hold_them() -> None:
    requests = [2.0, *map(float, HARD.split()), 0, 1]
    started = time.process_time()
    placed = place(requests, 15)
    assert time.process_time() - started < 10
    loads: Counter[int] = Counter()
    for request, devices in zip(requests, placed, strict=True):
        assert len(set(devices)) == math.ceil(request)
        for device in devices:
            loads[device] += min(Fraction(str(request)), Fraction(1))  # type: ignore[assignment]
    assert set(loads) == set(range(len(loads)))
    assert max(loads.values()) <= 1


def test_hard_and_large_requests_are_answered_soon() -> None:
    started = time.process_time()
    with pytest.raises(ResourceError):  # no order of these 16 fits, and the sum does not tell
        place([0.501] * 9 + [0.26, 0.27, 0.28, 0.24, 0.25, 0.31, 0.33], 8)
    place([Fraction(1, 8)] * 512, 64)
    place([0.3, 0.7] * 40 + [0.45, 0.55] * 20, 60)
    assert time.process_time() - started < 5
