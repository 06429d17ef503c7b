"""Every kind of loader by 1, 2 and 3 ranks: real processes with 256 file descriptors.

For the whole table, which is ``slow``, /dev/shm has 64 MiB.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loader_kinds import KINDS, ROWS, Kind
from kit.loaders_job import LENGTHS, SHAPES, evaluate_rows, run_in_group, run_kind, run_tokens
from kit.places import IMPORTS, TESTS
from kit.ranks import run_own_ranks

# Few kinds in the default run, for each way in which samples are shared out; the whole table is `slow`.
QUICK = ("tensors shuffled", "unsized sampler", "custom batch_sampler", "elements", "batches", "stream", "workers")
AT_ONCE = 12


def run_ranks_limited(world_size: int, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """What each rank saw, for each kind of loader; all in one start of ranks."""
    job = [sys.executable, str(TESTS / "kit" / "loaders_job.py"), str(world_size), str(folder), ",".join(names)]
    limits = 'ulimit -n 256 && exec "$@"'
    command = ["sh", "-c", limits, "sh", *job]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0:
        small = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
        command = ["unshare", "--mount", "sh", "-c", small + limits, "sh", *job]
    env = {**os.environ, "PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_own_ranks(with_few_descriptors, 2, ["edges", *QUICK], folder=tmp_path_factory.mktemp("quick"))


def with_few_descriptors(names: list[str]) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    torch.multiprocessing.set_sharing_strategy("file_system")
    warnings.simplefilter("ignore")  # of torch, that two workers are many for a rank's one CPU
    return run_in_group(names)


_tables: dict[tuple[int, int], list[dict[str, Any]]] = {}


def table(kind: Kind, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """What ranks saw of a kind, and of its neighbours in the table: some at once, so that a hang shows in a minute."""
    place = KINDS.index(kind) // AT_ONCE
    if (world_size, place) not in _tables:
        names = [kind.name for kind in KINDS[place * AT_ONCE : (place + 1) * AT_ONCE]]
        _tables[world_size, place] = run_ranks_limited(world_size, names, folder)
    return _tables[world_size, place]


def check(kind: Kind, ranks: list[dict[str, Any]]) -> None:
    alone = run_kind(kind, len(ranks), "single")
    facts = [rank[kind.name] for rank in ranks]

    # Training: the shards are disjoint, and together what one process trains on.
    trained = Counter(i for rank in facts for batch in rank["seen"] for i in batch)
    assert trained == Counter(i for batch in alone["seen"] for i in batch)
    if kind.once:
        assert set(trained) == set(range(ROWS))
        assert len(set(trained.values())) == 1
    for rank in facts:
        for mine, its in zip(rank["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-9)
        assert rank["loss"] == pytest.approx(alone["loss"], abs=1e-9)

        # Evaluation: every row once, in order, and of the same values.
        assert rank["index"].tolist() == alone["index"].tolist()
        if kind.once and kind.in_rows:
            assert rank["index"].tolist() == list(range(ROWS))
        assert rank["y_pred"].dtype == alone["y_pred"].dtype == torch.float64
        torch.testing.assert_close(rank["y_pred"], alone["y_pred"], rtol=0, atol=1e-9)
        assert torch.equal(rank["y_true"], alone["y_true"])
        assert rank["test_loss"] == (
            None if alone["test_loss"] is None else pytest.approx(alone["test_loss"], abs=1e-9)
        )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in QUICK], ids=lambda kind: kind.name)
def test_ranks_equal_one_process(kind: Kind, quick: list[dict[str, Any]]) -> None:
    check(kind, quick)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_equal_one_process_for_every_kind(kind: Kind, world_size: int, tmp_path: Path) -> None:
    check(kind, table(kind, world_size, tmp_path))


def test_the_table_is_as_large_as_it_says() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 25
    assert {kind.name for kind in KINDS} >= set(QUICK)


def check_edges(ranks: list[dict[str, Any]]) -> None:
    facts = [rank["edges"] for rank in ranks]
    for length in LENGTHS:
        rows, loss = evaluate_rows(length, len(ranks), "single")
        assert rows == list(range(length))
        for rank in facts:
            assert rank["evaluated"][length][0] == rows
            assert rank["evaluated"][length][1] == (loss if length == 0 else pytest.approx(loss, abs=1e-12))
    assert facts[0]["evaluated"][0][1].startswith("test_loader has no batches")
    for shape in SHAPES:
        alone = run_tokens(len(ranks), "single", *shape)
        for rank in facts:
            for mine, its in zip(rank["tokens"][shape], alone, strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-9)


def test_few_and_odd_numbers_of_samples(quick: list[dict[str, Any]]) -> None:
    check_edges(quick)


@pytest.mark.slow
def test_few_and_odd_numbers_of_samples_on_3_ranks(tmp_path: Path) -> None:
    check_edges(run_ranks_limited(3, ["edges"], tmp_path))


def test_streams_of_10_and_7_batches_are_trained_once(quick: list[dict[str, Any]]) -> None:
    first, second = ([i for batch in rank["edges"]["streamed"] for i in batch] for rank in quick)
    assert first == list(range(40))
    assert second == list(range(40, 68))


SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

from kit.loaders_job import Linear, make_loop
from kit.loader_kinds import make_rows


class Mine(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return tuple(column[index] for column in make_rows())


def collate(samples):
    return tuple(map(torch.stack, zip(*samples)))


if __name__ == "__main__":
    loader = DataLoader(Mine(), 2, num_workers=1, collate_fn=collate, multiprocessing_context="spawn")
    loop = make_loop(Linear(), loader, loader, 2, "ddp")
    loop.fit(num_epochs=1)
    print(loop.predict_on_test_set()[2]["index"].tolist())
"""


@pytest.mark.slow
def test_workers_that_ranks_spawn_find_what_main_defines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": IMPORTS, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines()[-1] == str(list(range(9)))
