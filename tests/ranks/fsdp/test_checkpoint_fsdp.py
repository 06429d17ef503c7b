"""Checkpoints that ranks of ``fsdp`` write in parts: read in any mode, by any number of ranks; damage; one file."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import OneRow, Tower, needs_fsdp_on_cpu
from test_parity_fsdp import adam, data, distance, factored, float64
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.__main__ import main
from trainloop.callbacks import ExponentialMovingAverage, ModelCheckpoint
from trainloop.checkpoint import checkpoints, load
from trainloop.errors import ConfigurationError, WorkerFailedError


class ByRow(torch.optim.Optimizer):
    """Divides gradients by a mean over each row, and steps by a kernel for several tensors, as Nero."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
            rows = p.grad.square().mean(-1, keepdim=True) if p.ndim == 2 else p.grad.square()
            means = self.state[p].setdefault("means", torch.zeros_like(rows)).mul_(0.9).add_(rows)
            torch._foreach_sub_([p], [0.1 * p.grad / (1 + means)])


class Killed(AbstractCallback):
    """Ends rank 1 by SIGKILL after its third step, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__("Killed")
        self.mark = folder / "killed"

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 3 and loop.rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fitted(mode: str, ranks: int, folder: Path | None = None, epochs: int = 3, **given: Any) -> TrainLoop[Any]:
    """Over 24 samples in steps of 12, so that any number of ranks to 4 takes the same steps."""
    model = given.pop("model", Tower)()
    checkpoint_args, more = given.pop("checkpoint_args", {}), given.pop("callbacks", [])
    optimizer_of = given.pop("optimizer_of", adam)
    loop = TrainLoop(
        model,
        data(24, 12 // ranks, shuffle=True),
        optimizer=optimizer_of(model),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode=mode,
        **({} if mode == "single" else {"accelerator": "cpu", "devices": ranks}),
        seed=3,
        progress_bar=False,
    )
    keeper = [] if folder is None else [ModelCheckpoint(folder, **checkpoint_args)]
    callbacks = [*keeper, ExponentialMovingAverage(0.9), *more]
    arguments = {"ddp_model_args": {"find_unused_parameters": True}} if mode == "ddp" else {}
    loop.fit(num_epochs=epochs, callbacks=callbacks, **arguments, **given)
    return loop


def state_of(loop: TrainLoop[Any]) -> list[Any]:
    return [dict(loop.model.state_dict()), loop.optimizer.state_dict()["state"], loop.history.to_dict()]


def exported(folder: Path, file: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    assert main(["checkpoint", "export", str(folder), str(file)]) == 0
    return load_file(file)


@pytest.mark.long
def test_parts_of_two_ranks_resumed_bit_by_bit_and_in_one_process(tmp_path: Path, capsys: Any) -> None:
    with float64():
        loop = TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2)
        with loop.ranks():
            whole = fitted("fsdp", 2, tmp_path / "a", checkpoint_args={"every_n_steps": 1, "keep": None})
            files = {c.info.step: c.path for c in checkpoints(tmp_path / "a") if c.info is not None}
            resumed = fitted("fsdp", 2, tmp_path / "b", resume_from=files[3])  # within the second epoch
        assert distance(state_of(whole), state_of(resumed)) == 0
        assert all(load(path)["place"]["global_step"] == step for step, path in files.items())
        assert {"__0_0.distcp", "__1_0.distcp", "state.pt"} <= set(os.listdir(files[3]))
        sizes = [os.path.getsize(os.path.join(files[3], f"__{rank}_0.distcp")) for rank in range(2)]
        assert max(sizes) < 1.5 * min(sizes)
        single = fitted("single", 1, tmp_path / "c", resume_from=files[3])
        assert distance(state_of(single), state_of(whole)) < 1e-9

        weights = exported(Path(files[6]), tmp_path / "model.safetensors")
        assert distance(weights, load(files[6])["model"]) == 0
        Tower().load_state_dict(weights)

        # A damaged part: the checkpoint before is taken, and a word said.
        shutil.rmtree(tmp_path / "a" / Path(files[6]).name)
        with open(os.path.join(files[5], "__1_0.distcp"), "r+b") as file:
            file.seek(100)
            file.write(b"damage")
        with pytest.warns(RuntimeWarning, match="__1_0.distcp is missing or damaged"):
            again = fitted("single", 1, tmp_path / "a", resume_from="last")
        assert distance(state_of(again), state_of(whole)) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize(
    "model, optimizer_of",
    [
        (Tower, factored),
        pytest.param(
            OneRow,
            lambda model: ByRow(model.parameters()),
            marks=pytest.mark.skipif(TorchVersion("2.14") <= torch.__version__, reason="torch refuses its first step"),
        ),
    ],
)
def test_state_that_is_not_of_its_parameters_shape_is_resumed(model: Any, optimizer_of: Any, tmp_path: Path) -> None:
    """Some is a sum of which each rank has a term, such as the means of the columns of a matrix with divided rows."""
    given: Any = {"model": model, "optimizer_of": optimizer_of}
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2).ranks():
        whole = fitted("fsdp", 2, tmp_path / "a", **given)
        for mode, ranks in (("fsdp", 2), ("single", 1)):
            shutil.rmtree(tmp_path / "b", ignore_errors=True)
            fitted("fsdp", 2, tmp_path / "b", epochs=1, **given)
            again = fitted(mode, ranks, tmp_path / "b", resume_from="last", **given)
            assert distance(state_of(again), state_of(whole)) < 1e-9
            assert again.global_step == whole.global_step


class Slow(AbstractCallback):
    """Delays rank 1's writing threads; notes on rank 0 whether steps went on meanwhile."""

    def __init__(self) -> None:
        super().__init__("Slow")
        self.steps_beside = 0

    def on_train_begin(self) -> None:
        from trainloop.checkpoint import sharded_writing

        if self.train_loop_obj.rank == 1 and not hasattr(sharded_writing, "write_parts"):
            sharded_writing.write_parts = sharded_writing._write_parts
            sharded_writing._write_parts = lambda *args: (time.sleep(0.3), sharded_writing.write_parts(*args))[1]

    def on_after_optimizer_step(self) -> None:
        self.steps_beside += any(t.name.startswith("checkpoint of") for t in threading.enumerate())


@pytest.mark.long
def test_parts_written_beside_the_training_are_of_their_step_and_others_readers_find_them(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    slow = Slow()
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2).ranks():
        settings = {"every_n_steps": 1, "keep": None}
        whole = fitted("fsdp", 2, tmp_path / "a", checkpoint_args=settings)
        beside = fitted("fsdp", 2, tmp_path / "b", checkpoint_args={**settings, "async_save": True}, callbacks=[slow])
        assert slow.steps_beside > 0
        assert distance(state_of(whole), state_of(beside)) == 0
        found = [{c.info.step: load(c.path) for c in checkpoints(tmp_path / name)} for name in "ab"]
        assert list(found[0]) == list(found[1]) == [1, 2, 3, 4, 5, 6]
        for one, other in zip(found[0].values(), found[1].values(), strict=True):
            assert (
                distance(
                    [one["model"], one["optimizers"][0]["state"]["state"]],
                    [other["model"], other["optimizers"][0]["state"]["state"]],
                )
                == 0
            )
        # What is left in each folder, and what torch's own reader makes of it.
        last = checkpoints(tmp_path / "b")[-1].path
        assert sorted(os.listdir(last)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]
        assert distance(load(Path(last) / "state.pt")["model"], load(last)["model"]) == 0
        dcp_to_torch_save(last, tmp_path / "torch.pt")
        theirs = torch.load(tmp_path / "torch.pt", weights_only=True)
        assert torch.equal(theirs["model.words.weight"], beside.model.words.weight)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["single 1", "ddp 2", "fsdp 1", "fsdp 2", "fsdp 4"])
@pytest.mark.filterwarnings("ignore:devices=4 on 2 CPU cores")
def test_every_mode_reads_what_every_mode_wrote(writer: str, tmp_path: Path) -> None:
    with float64():
        expected = fitted("single", 1)
        mode, ranks = writer.split()
        fitted(mode, int(ranks), tmp_path / "a", epochs=2)
        for reader in ("single 1", "ddp 2", "fsdp 1", "fsdp 2", "fsdp 4"):
            mode, ranks = reader.split()
            shutil.copytree(tmp_path / "a", tmp_path / reader)
            resumed = fitted(mode, int(ranks), tmp_path / reader, resume_from="last")
            assert resumed.global_step == 6
            assert distance(state_of(resumed), state_of(expected)) < 1e-9, reader


@pytest.mark.long
def test_values_left_in_checkpoints_are_not_mixed_with_those_of_the_model(tmp_path: Path) -> None:
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2).ranks():
        expected = {epochs: fitted("single", 1, epochs=epochs) for epochs in (2, 3)}
        loop = fitted("fsdp", 2, tmp_path, epochs=2, gather=False, checkpoint_args={"monitor": "loss"})
        keeper = next(callback for callback in loop.callbacks if isinstance(callback, ModelCheckpoint))
        assert loop.history["loss"] == pytest.approx(expected[2].history["loss"])
        assert distance(loop.model.state_dict(), Tower().state_dict()) == 0  # the scalar one, too
        for it in (loop, copy.deepcopy(loop)):
            for again in (
                lambda it=it: it.fit(num_epochs=1),
                lambda it=it: it.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path / "b")], gather=False),
                lambda it=it: it.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path / "b")], resume_from="last"),
                loop.evaluate_loss_on_train_set if it is loop else it.predict_on_train_set,
            ):
                with pytest.raises(ConfigurationError, match=r"initial values. .* only in the checkpoint.*'last'"):
                    again()
        loop.model.load_state_dict(load(tmp_path)["model"])
        loaded = TrainLoop(loop.model, loop.train_loader, criterion=loop.criterion, gpu_mode="fsdp", devices=2)
        found = loaded.evaluate_loss_on_train_set()
        assert found == pytest.approx(expected[2].evaluate_loss_on_train_set())
        keeper.load_best()
        assert loop.evaluate_loss_on_train_set() > 0
        assert distance(loop.model.state_dict(), load(keeper.best_path)["model"]) == 0
        callbacks = [ModelCheckpoint(tmp_path), ExponentialMovingAverage(0.9)]
        loop.fit(num_epochs=3, callbacks=callbacks, resume_from="last")
        assert distance(state_of(loop), state_of(expected[3])) < 1e-9
        assert loop.evaluate_loss_on_train_set() == pytest.approx(expected[3].evaluate_loss_on_train_set())


class OwnAverage(AbstractCallback):
    """Keeps an average of the weights, and shards it again if told to."""

    def __init__(self, shards: bool) -> None:
        super().__init__("own average")
        self.shards, self.average = shards, {}

    def on_after_optimizer_step(self) -> None:
        for name, p in self.train_loop_obj.model.named_parameters():
            kept = self.average.get(name, p.detach().clone())
            if self.shards and isinstance(p, DTensor) and not isinstance(kept, DTensor):
                kept = distribute_tensor(kept, p.device_mesh, p.placements, src_data_rank=None)
            self.average[name] = kept.lerp(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


@pytest.mark.long
def test_copies_of_weights_that_a_callback_keeps_are_full_after_a_resume(tmp_path: Path) -> None:
    whole = OwnAverage(shards=True)
    fitted("fsdp", 2, epochs=2, callbacks=[whole])
    fitted("fsdp", 2, tmp_path, epochs=1, callbacks=[OwnAverage(shards=True)])
    with pytest.raises(WorkerFailedError, match=r"OwnAverage.on_after_optimizer_step .* call distribute_tensor\(t, p"):
        fitted("fsdp", 2, tmp_path, epochs=2, callbacks=[OwnAverage(shards=False)], resume_from="last")
    resumed = OwnAverage(shards=True)
    fitted("fsdp", 2, tmp_path, epochs=2, callbacks=[resumed], resume_from="last")
    for name, value in whole.average.items():
        assert torch.equal(value, resumed.average[name])


class AverageOnRank0(OwnAverage):
    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.is_global_zero:
            super().on_after_optimizer_step()


class AsksForTheState(AbstractCallback):
    def on_epoch_end(self) -> None:
        self.train_loop_obj.checkpoint_state()


@pytest.mark.long(but=1)
@needs_fsdp_on_cpu
@pytest.mark.parametrize("in_one_file", [False, True])
def test_a_state_with_shards_of_rank_0_alone_is_named_instead_of_written_without_a_part(
    in_one_file: bool, tmp_path: Path
) -> None:
    beside = [AverageOnRank0(shards=True), *([AsksForTheState()] if in_one_file else [])]
    with pytest.raises(
        WorkerFailedError, match=r"callbacks\.\d\.state\.average\..* on some ranks only.* state_dict\(\) has to"
    ):
        fitted("fsdp", 2, None if in_one_file else tmp_path, epochs=1, callbacks=beside)
    assert not list(tmp_path.iterdir())


@needs_fsdp_on_cpu
def test_gather_must_be_a_bool(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="gather='no'"):
        fitted("fsdp", 2, tmp_path, gather="no")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("gather", [True, False])
def test_a_run_survives_a_killed_rank_bit_by_bit(tmp_path: Path, gather: bool) -> None:
    """Each rank writes its part of the checkpoints for restarts, so that nothing need be gathered."""
    with float64():
        undisturbed = fitted("fsdp", 2, tmp_path / "undisturbed")
        killed = fitted(
            "fsdp",
            2,
            tmp_path / "struck",
            callbacks=[Killed(tmp_path)],
            max_restarts=1,
            restart_every_steps=1,
            gather=gather,
        )
    assert [(restart.rank, restart.step) for restart in killed.restarts] == [(1, 2)]
    if gather:
        assert distance(state_of(killed), state_of(undisturbed)) == 0
    assert killed.history.to_dict() == undisturbed.history.to_dict()
    saved, expected = (load(tmp_path / name)["model"] for name in ("struck", "undisturbed"))
    assert distance(saved, expected) == 0


class KilledInWriting(AbstractCallback):
    """Ends a rank by SIGKILL in the thread that writes its third checkpoint, once.

    Of rank 1 when its part is on the disk, and nobody knows; of rank 0 when all is there but for the folder's name.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__("KilledInWriting")
        self.mark, self.rank, self.calls = folder / "killed", rank, 0

    def on_train_begin(self) -> None:
        from trainloop.checkpoint import sharded_writing

        if self.train_loop_obj.rank != self.rank or self.mark.exists():
            return
        name = "_report_to_rank_zero" if self.rank else "publish"
        real = getattr(sharded_writing, name)

        def third_kills(*args: Any) -> Any:
            self.calls += 1
            if self.calls == 3:
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(sharded_writing, name, third_kills)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_parts_are_written_beside_the_training(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    settings: dict[str, Any] = {"checkpoint_args": {"every_n_steps": 1, "keep": None, "async_save": True}}
    with float64():
        undisturbed = fitted("fsdp", 2)
        with pytest.raises(WorkerFailedError) as failure:
            fitted("fsdp", 2, folder, callbacks=[KilledInWriting(tmp_path, rank)], **settings)
        assert failure.value.rank == rank
        found = checkpoints(folder)
        assert [load(c.path)["place"]["global_step"] for c in found] == [1, 2]
        if rank == 0:
            assert len(os.listdir(folder)) == len(found) + 2  # '.newest', and the half one
        resumed = fitted("fsdp", 2, folder, resume_from="last", **settings)
        assert distance(state_of(resumed), state_of(undisturbed)) == 0
    names = {Path(c.path).name for c in checkpoints(folder) if c.info is not None}
    assert len(names) >= 6
    assert set(os.listdir(folder)) == {*names, ".newest"}


@needs_fsdp_on_cpu
def test_what_parts_cannot_be_is_said_before_ranks_start(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"safetensors=True.*gpu_mode='fsdp' is not supported.*checkpoint export"
    ):
        fitted("fsdp", 2, tmp_path, checkpoint_args={"safetensors": True})
    assert torch.get_default_dtype() == torch.float32


class Untied(Tower):
    """Without a scalar, which has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        del self.temperature
        self.temperature = 1.0


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_trained_into_its_checkpoint(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Untied()
    keeper = ModelCheckpoint(tmp_path)
    loop = cpu_loop(model, data(24, 4), adam(model), gpu_mode="fsdp", devices=2)
    with pytest.raises(ConfigurationError, match=r"words.weight is on the meta device.*gather=False"):
        loop.fit(num_epochs=1, callbacks=[keeper])
    with pytest.raises(ConfigurationError, match="callbacks has no ModelCheckpoint"):
        loop.fit(num_epochs=1, gather=False)
    assert loop.fit(num_epochs=2, callbacks=[keeper], gather=False) is model
    assert all(p.is_meta for p in model.parameters())
    assert loop.optimizer.state_dict()["state"] == {}
    assert loop.history["loss"][1] < loop.history["loss"][0]
    trained = load(tmp_path)["model"]
    assert torch.equal(trained["head.weight"], trained["words.weight"])  # tied, and made by the embedding's own values
    assert 0.1 < float(trained["blocks.0.up.weight"].std()) < 0.5
    Untied().load_state_dict(trained)


class Normalized(TTBasicModel):
    """Its normalizer replaces its parameters when they are loaded."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.normalizer = Normalizer(mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.normalizer(x))


class Normalizer(nn.Module):
    def __init__(self, mean: float) -> None:
        super().__init__()
        self.values = nn.ParameterDict({"mean": nn.Parameter(torch.full((8,), mean), requires_grad=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.values["mean"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.values["mean"] = nn.Parameter(state_dict[f"{prefix}values.mean"].clone(), requires_grad=False)


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < TorchVersion("2.11"), reason="an error that says so before PyTorch 2.11")
@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks")
def test_a_parameter_that_its_module_replaces_when_it_loads_comes_back_to_the_caller(tmp_path: Path) -> None:
    def loop(value: float) -> TrainLoop[Any]:
        torch.manual_seed(0)
        model = Normalized(value)
        return cpu_loop(
            model,
            DataLoader(make_data(24), batch_size=6),
            torch.optim.SGD(model.layers.parameters(), 0.1),
            gpu_mode="fsdp",
            devices=2,
        )

    whole, resumed = loop(2.0), loop(0.5)
    whole.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)])
    first = next(c.path for c in checkpoints(tmp_path) if c.info is not None and c.info.step == 2)
    resumed.fit(num_epochs=2, resume_from=first)
    assert distance(dict(resumed.model.state_dict()), dict(whole.model.state_dict())) == 0
