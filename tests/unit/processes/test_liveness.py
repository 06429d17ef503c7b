"""Which rank hangs, decided from what the launching process reads; no process is started."""

from __future__ import annotations

import linecache

import pytest

from trainloop._launch.failures import Failure, first_failure, worker_failed_error
from trainloop._launch.liveness import Liveness, Sign, hanging_ranks

WORKS, DONE = True, False


def test_ranks_that_all_work_are_left_alone() -> None:
    liveness = Liveness(10)
    for now in (0, 1000, 5000):
        assert liveness.overdue([Sign(3, WORKS), Sign(3, WORKS)], now) == []


def test_a_rank_is_overdue_once_another_has_been_done_for_so_long() -> None:
    liveness = Liveness(10)
    liveness.overdue([Sign(3, WORKS), Sign(3, WORKS)], 0)
    assert liveness.overdue([Sign(3, DONE), Sign(3, WORKS)], 100) == []  # its silence counts from here on
    assert liveness.overdue([Sign(3, DONE), Sign(3, WORKS)], 110) == []
    assert liveness.overdue([Sign(3, DONE), Sign(3, WORKS)], 110.1) == [1]


def test_a_sign_of_life_starts_the_time_anew() -> None:
    liveness = Liveness(10)
    liveness.overdue([Sign(3, DONE), Sign(3, WORKS), Sign(3, WORKS)], 0)
    liveness.overdue([Sign(3, DONE), Sign(4, WORKS), Sign(3, WORKS)], 8)
    assert liveness.overdue([Sign(3, DONE), Sign(4, WORKS), Sign(3, WORKS)], 11) == [2]
    assert liveness.overdue([Sign(3, DONE), Sign(4, WORKS), Sign(3, DONE)], 18.1) == [1]


def test_the_ranks_of_another_host_wait_as_well() -> None:
    liveness = Liveness(10)
    assert liveness.overdue([Sign(3, WORKS)], 0) == []
    assert liveness.overdue([Sign(3, WORKS)], 50, done_elsewhere_since=41) == []
    assert liveness.overdue([Sign(3, WORKS)], 52, done_elsewhere_since=41) == [0]


def test_where_all_are_done_their_processes_have_to_end() -> None:
    liveness = Liveness(10)
    liveness.overdue([Sign(3, DONE), Sign(3, WORKS)], 0)
    assert liveness.overdue([Sign(3, DONE), Sign(3, DONE)], 9) == []
    assert liveness.overdue([Sign(3, DONE), Sign(3, DONE)], 18) == []
    assert liveness.overdue([Sign(3, DONE), Sign(3, DONE)], 19.1) == [0, 1]


def stack(*frames: str, main: bool = True) -> str:
    lines = [f'  File "/site-packages/{file}", line 1 in {name}' for file, name in (f.split(":") for f in frames)]
    if main:
        lines.append('  File "/site-packages/trainloop/_launch/rank_process.py", line 1 in run_rank')
    other = 'Thread 0x0000aa (most recent call first):\n  File "/python/threading.py", line 1 in wait\n\n'
    return other + "\n".join(["Current thread 0x0000bb (most recent call first):", *lines, ""])


USER = stack("user.py:get_loss", "torch/nn/parallel/distributed.py:forward")
IN_COLLECTIVE = stack("torch/distributed/distributed_c10d.py:all_gather", "user.py:get_loss")
IN_BACKWARD = stack("torch/autograd/graph.py:_engine_run_backward", "trainloop/train_loop.py:_backward")
AT_BOUNDARY = stack("trainloop/_support/stopping.py:_vote_to_stop")


@pytest.mark.parametrize(
    ("stacks", "boundaries", "hanging"),
    [
        pytest.param({0: IN_COLLECTIVE, 1: USER}, {0: 4, 1: 4}, [1], id="the one outside of collectives"),
        pytest.param({1: USER, 2: IN_BACKWARD}, {0: 4, 1: 4, 2: 4}, [1], id="not one that may wait in backward"),
        pytest.param({2: IN_BACKWARD}, {0: 4, 2: 4}, [2], id="that one where there is no other"),
        pytest.param({1: USER, 2: USER}, {0: 5, 1: 5, 2: 4}, [2], id="the one that is a step behind"),
        pytest.param({1: "none: it did not answer", 2: AT_BOUNDARY}, {0: 5, 1: 4, 2: 5}, [1], id="a stopped one"),
        pytest.param({0: IN_COLLECTIVE, 1: IN_COLLECTIVE}, {0: 1, 1: 1}, [], id="none: all wait for each other"),
        pytest.param({1: USER, 2: USER}, {0: 5, 1: 5, 2: 5}, [1, 2], id="two"),
    ],
)
def test_who_hangs_is_told_by_stacks_and_steps(
    stacks: dict[int, str], boundaries: dict[int, int], hanging: list[int]
) -> None:
    assert hanging_ranks(stacks, boundaries) == hanging


def test_a_rank_that_died_comes_before_those_that_lost_it() -> None:
    lost = Failure(rank=0, time_ns=1, type="RuntimeError", consequence=True)
    aborted = Failure(rank=1, time_ns=9, type=None, exitcode=-6, consequence=True)
    raised = Failure(rank=2, time_ns=20, type="ValueError")
    assert first_failure([lost, aborted]).rank == 1
    assert first_failure([lost, aborted, raised]).rank == 2


def test_a_notebook_s_cell_has_its_lines_in_a_rank_s_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "/tmp/ipykernel_1/cell.py"
    monkeypatch.setitem(linecache.cache, cell, (9, None, ["def f():\n", "    g(1)\n"], cell))
    frames = f'  File "{__file__}", line 1, in run\n  File "{cell}", line 2, in f\n'
    error = worker_failed_error(
        Failure(0, 0, "ValueError", "x", f"Traceback (most recent call last):\n{frames}ValueError: x\n"),
        world_size=2,
        ended=(),
    )
    shown = frames + "    g(1)\n"
    assert error.traceback == f"Traceback (most recent call last):\n{shown}ValueError: x\n"
    # Added once only, also in a group of exceptions.
    grouped = "".join(f"  | {line}\n" for line in shown.splitlines())
    assert worker_failed_error(Failure(0, 0, "ValueError", "x", grouped), world_size=2, ended=()).traceback == grouped
