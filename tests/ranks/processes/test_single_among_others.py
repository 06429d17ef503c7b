"""A run in one process, which is one of a launcher's processes or a rank of another run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.small_loop import make_loop

from trainloop import AbstractCallback, distributed
from trainloop._launch import warn_of_processes_alone
from trainloop.callbacks import ModelCheckpoint

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


class Predicts(AbstractCallback):
    """Counts rows that it reads as a stream, and calls of a function for rank 0."""

    def __init__(self) -> None:
        super().__init__("predicts")
        self.rows = self.calls = 0

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        self.rows += sum(len(rows) for rows, _, _ in loop.predict_with_model(loop.validation_loader, stream=True))
        self._count()

    @distributed.rank_zero_only
    def _count(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_each_process_of_a_launcher_saves_and_resumes_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    first, then = Predicts(), Predicts()
    make_loop().fit(num_epochs=2, callbacks=[first, ModelCheckpoint(tmp_path)])
    assert (first.rows, first.calls) == (2 * 33, 2)
    make_loop().fit(num_epochs=3, callbacks=[then, ModelCheckpoint(tmp_path)], resume_from="last")
    assert (then.rows, then.calls) == (33, 1)  # of the third epoch
    assert distributed.get_rank() == 1


def test_a_barrier_that_can_not_wait_says_so(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    distributed.barrier()
    for name, value in SLURM.items():  # a job's step of independent processes
        monkeypatch.setenv(name, value)
    distributed.barrier()
    assert not recwarn.list
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=r"init_process_group\(\) before it") as caught:
        distributed.barrier()
    assert [warning.filename for warning in caught] == [__file__]


class TrainsOnRankOne(AbstractCallback):
    """Trains another model on rank 1, while rank 0 waits for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("trains on rank 1")
        self.folder = folder

    def on_epoch_end(self) -> None:
        if self.train_loop_obj.rank == 1:
            make_loop().fit(num_epochs=2, callbacks=[Predicts(), ModelCheckpoint(self.folder)])
        assert distributed.all_reduce(1.0, "sum") == 2.0


def test_a_rank_of_another_run_trains_without_the_other_ranks(tmp_path: Path) -> None:
    outer = make_loop(gpu_mode="ddp", devices=2)
    outer.fit(num_epochs=1, callbacks=[TrainsOnRankOne(tmp_path)])
    assert len(list(tmp_path.glob("*.pt"))) == 2
    assert outer.history["val_loss"]


BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train.sh", "SLURM_NNODES": "2", **SLURM, "SLURM_PROCID": "0"}
ALONE = {
    "torchrun": (
        {**TORCHRUN, "RANK": "0"},
        "single",
        "torchrun has started 2 processes.*Pass gpu_mode='ddp' or 'fsdp'",
    ),
    "srun": (
        {**SLURM, "SLURM_PROCID": "0"},
        "dp",
        "srun has started 4 processes.*gpu_mode='dp' each of them trains a mod",
    ),
    "mpirun": (
        {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"},
        "ddp",
        r"a launcher \(OMPI_COMM_WORLD_SIZE=3\) has started 3 processes.*starts ranks of its own.*by torchrun",
    ),
    "no rendezvous point": ({"RANK": "0", "WORLD_SIZE": "2"}, "single", r"a launcher \(WORLD_SIZE=2\) has started 2"),
    "a batch script without srun": (BATCH, "ddp", "2 nodes, but srun has not started this process.*this node only"),
    "another rank": ({**TORCHRUN, "RANK": "1"}, "single", None),
    "one process": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, "single", None),
    "ranks": ({**TORCHRUN, "RANK": "0"}, "ddp", None),
    "a batch script in one process": (BATCH, "single", None),
}


@pytest.mark.parametrize("name", ALONE)
def test_processes_that_train_alone_are_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    environ, mode, message = ALONE[name]
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    if mode == "single":
        make_loop().fit(num_epochs=1)
        make_loop().evaluate_loss_on_validation_set()  # without a second warning
    else:
        warn_of_processes_alone(mode)
    assert len(recwarn) == (message is not None)
    if message is not None:
        assert re.search(message, str(recwarn[0].message)), recwarn[0].message


@pytest.mark.long
def test_a_batch_script_without_srun_starts_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**BATCH, "SLURM_NNODES": "1"}.items():
        monkeypatch.setenv(key, value)
    loop = make_loop(gpu_mode="ddp", devices=2)
    loop.fit(num_epochs=1)
    assert len(loop.history["loss"]) == 1
