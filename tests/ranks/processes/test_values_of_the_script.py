"""What the script's classes change in globals, outer variables and class attributes in ranks comes back."""

from __future__ import annotations

import array
import functools
import importlib
import logging
import multiprocessing
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.sharded_models import needs_fsdp_on_cpu
from kit.small_loop import make_loop
from torch import Tensor

from trainloop import AbstractCallback, TTBasicModel
from trainloop.callbacks import ModelCheckpoint

losses: list[float] = []
count = 0
means = {"y": torch.zeros(())}
added: int


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]


meter = Meter()


class Totals:
    """A class of the script that is no part of the loop."""

    notes = 0

    @staticmethod
    def note() -> None:
        Totals.notes += 1


def note(value: float, recent: list[float] = []) -> None:  # noqa: B006
    """Called by a method, so that what it uses counts, too."""
    global count
    count += 1
    Totals.note()
    note.last = value  # type: ignore[attr-defined]
    recent.append(value)
    meter.total += value
    meter.values.append(value)


class Net(TTBasicModel):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        loss = super().get_loss(batch_data, criterion, device)
        if self.training:
            Net.calls += 1
            means["y"] = 0.5 * means["y"] + batch_data[1].float().mean()
        return loss


def changed(**ranks: Any) -> dict[str, Any]:
    """Train, and return what the script sees afterwards."""
    global count, meter
    losses.clear()
    count, meter, Net.calls, means["y"] = 0, Meter(), 0, torch.zeros(())
    Totals.notes = 0
    vars(note).clear()
    recent: list[float] = note.__defaults__[0]  # type: ignore[index]
    recent.clear()
    own_meter, seen, outer = meter, [], 1.0

    class Notes(AbstractCallback):
        def on_epoch_end(self) -> None:
            nonlocal outer
            loss = self.train_loop_obj.history["loss"][-1]
            losses.append(loss)
            seen.append(loss)
            outer += loss
            note(loss)

    make_loop(Net(), validation=False, **ranks).fit(num_epochs=2, callbacks=[Notes()])
    assert meter is own_meter
    return {
        "losses": list(losses),
        "seen": seen,
        "outer": outer,
        "count": count,
        "calls": Net.calls,
        "notes": Totals.notes,
        "mean": means["y"].item(),
        "total": meter.total,
        "values": meter.values,
        "last": note.last,  # type: ignore[attr-defined]
        "recent": list(recent),
    }


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=needs_fsdp_on_cpu)])
def test_what_ranks_change_comes_back(mode: str) -> None:
    alone = changed()
    assert len(alone["losses"]) == alone["count"] == alone["notes"] == 2
    # One rank makes the same steps as one process.
    assert changed(gpu_mode=mode, accelerator="cpu", devices=1) == alone


activations: dict[str, Any] = {}


def keep(module: Any, args: Any, output: Tensor) -> None:
    """A hook that a script has for activations."""
    activations["shape"], activations["calls"] = tuple(output.shape), activations.get("calls", 0) + 1


named: dict[str, int] = {}


def keep_named(*_: Any, name: str) -> None:
    named[name] = named.get(name, 0) + 1


class Recorder:
    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def record(self, module: Any, args: Any, output: Tensor) -> None:
        self.shapes.append(output.shape[1:])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=needs_fsdp_on_cpu)])
def test_what_hooks_and_a_function_as_criterion_change_comes_back(mode: str) -> None:
    def trained(**ranks: Any) -> dict[str, Any]:
        activations.clear()
        named.clear()
        recorder, own = Recorder(), {"calls": 0}
        calls, steps, gradients, losses = 0, [], 0, 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        def count_gradients(_: Tensor) -> None:
            nonlocal gradients
            gradients += 1

        def criterion(y_pred: Tensor, y: Tensor) -> Tensor:
            nonlocal losses
            losses += 1
            return torch.nn.functional.cross_entropy(y_pred, y)

        loop = make_loop(Net(), validation=False, **ranks)
        loop.criterion = criterion
        loop.model.fc.register_forward_hook(keep)
        loop.model.fc.register_forward_pre_hook(count)
        loop.model.fc.register_forward_hook(recorder.record)
        loop.model.fc.register_forward_hook(functools.partial(keep_named, name="fc"))
        loop.model.fc.register_forward_hook(lambda *_, own=own: own.update(calls=own["calls"] + 1))
        if mode == "ddp":  # an error in fsdp
            loop.model.fc.weight.register_post_accumulate_grad_hook(count_gradients)
        loop.optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
        loop.fit(num_epochs=2)
        counts = {"pre": calls, "steps": steps, "gradients": gradients, "losses": losses}
        return {**activations, **counts, "recorded": recorder.shapes, "named": dict(named), "own": own["calls"]}

    alone = trained()
    assert alone["calls"] == alone["pre"] == alone["losses"] == len(alone["steps"]) > 2
    assert alone["calls"] == alone["named"]["fc"] == len(alone["recorded"]) == alone["own"]
    assert trained(gpu_mode=mode, accelerator="cpu", devices=1) == alone


@pytest.mark.long
def test_of_several_ranks_the_values_of_rank_0_come_back() -> None:
    ranks = changed(gpu_mode="ddp", accelerator="cpu", devices=2)
    assert len(ranks["losses"]) == len(ranks["seen"]) == ranks["count"] == 2
    assert ranks["outer"] == 1.0 + sum(ranks["seen"])
    assert ranks["calls"] > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", ["single", "ddp", pytest.param("fsdp", marks=[needs_fsdp_on_cpu, pytest.mark.long])])
def test_what_callbacks_add_to_the_loop_to_classes_and_to_modules_comes_back(mode: str) -> None:
    class Adds(AbstractCallback):
        def on_epoch_end(self) -> None:
            global added
            loop: Any = self.train_loop_obj
            loop.passes = getattr(loop, "passes", 0) + 1
            loop.numbers.append(loop.epoch)
            loop.weight = loop.model.fc.weight.detach().clone()
            loop.__dict__.pop("former", None)
            Adds.seen = getattr(Adds, "seen", 0) + 1  # type: ignore[attr-defined]
            added = loop.epoch + 1

    globals().pop("added", None)
    loop: Any = make_loop(Net(), validation=False, gpu_mode=mode, **({} if mode == "single" else {"devices": 2}))
    loop.numbers, loop.former = [7], 1
    numbers = loop.numbers
    loop.fit(num_epochs=2, callbacks=[Adds("adds")])
    assert (loop.passes, loop.numbers, hasattr(loop, "former")) == (2, [7, 0, 1], False)
    assert loop.numbers is numbers
    torch.testing.assert_close(loop.weight, loop.model.fc.weight.detach(), rtol=0, atol=0)
    assert (Adds.seen, added) == (2, 2)  # type: ignore[attr-defined]


def test_what_a_callback_of_an_imported_modules_function_changes_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks get its class by value, without its module."""
    (tmp_path / "of_makers.py").write_text(
        textwrap.dedent("""
            from trainloop import AbstractCallback

            losses = []

            def make(name):
                seen = []
                class Notes(AbstractCallback):
                    def on_epoch_end(self):
                        losses.append(name)
                        seen.append(name)
                        Notes.last = name
                return Notes(name), seen
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    of_makers = importlib.import_module("of_makers")
    (one, ones), (other, others) = of_makers.make("one"), of_makers.make("other")
    make_loop(Net(), validation=False, gpu_mode="ddp", devices=2).fit(num_epochs=1, callbacks=[one, other])
    assert (of_makers.losses, ones, others) == (["one", "other"], ["one"], ["other"])
    assert (type(one).last, type(other).last) == ("one", "other")


@pytest.mark.filterwarnings("ignore:.*can no longer be pickled, so your process does not get it")
def test_pipes_of_callbacks_stay_those_of_the_caller() -> None:
    """Ranks can't hand them on after their end: the state of the whole training would be lost."""

    class Reports(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("reports")
            self.ours, self.theirs = multiprocessing.Pipe(duplex=False)
            self.epochs, self.array = 0, array.array("d", [0.0])

        def on_epoch_end(self) -> None:
            self.epochs += 1
            self.array[0] += 0.5
            if self.train_loop_obj.is_main_process():
                self.theirs.send(self.train_loop_obj.epoch)

    reports = Reports()
    theirs = reports.theirs
    with reports.ours, theirs:
        make_loop(Net(), validation=False, gpu_mode="ddp", devices=2).fit(num_epochs=2, callbacks=[reports])
        assert (reports.epochs, reports.array[0], reports.theirs is theirs) == (2, 1.0, True)
        assert [reports.ours.recv() for _ in range(2)] == [0, 1]


def test_what_code_of_a_console_changes_comes_back() -> None:
    """As in ``code.interact()``, whose variables are in no module."""
    console: dict[str, Any] = {"__name__": "__console__"}
    text = """
        from trainloop import AbstractCallback

        seen = []

        class Notes(AbstractCallback):
            passes = 0

            def on_epoch_end(self):
                seen.append(self.train_loop_obj.epoch)
                Notes.passes += 1
    """
    exec(textwrap.dedent(text), console)
    loop = make_loop(Net(), validation=False, gpu_mode="ddp", devices=2)
    loop.fit(num_epochs=2, callbacks=[console["Notes"]("notes")])
    assert (console["seen"], console["Notes"].passes) == ([0, 1], 2)


@pytest.mark.long
def test_what_a_resumed_run_lacks_of_the_loop_is_named(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def fit(epochs: int, **resume: Any) -> None:
        class Best(AbstractCallback):
            def on_epoch_end(self) -> None:
                self.train_loop_obj.best = self.train_loop_obj.history["loss"][-1]  # type: ignore[attr-defined]

        loop: Any = make_loop(Net(), validation=False)
        loop.best = 0.5
        loop.fit(num_epochs=epochs, callbacks=[Best("best"), ModelCheckpoint(tmp_path)], **resume)

    fit(1)
    recwarn.clear()
    fit(2, resume_from="last")
    assert any("tl.best" in str(w.message) for w in recwarn.list)


@pytest.mark.long
def test_large_values_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(means, "y", torch.zeros(2**19))
    large = means["y"]

    class Changes(AbstractCallback):
        def on_epoch_end(self) -> None:
            means["y"].add_(1.0)

    make_loop(validation=False, gpu_mode="ddp", accelerator="cpu", devices=1).fit(num_epochs=1, callbacks=[Changes()])
    assert means["y"] is large
    assert not large.any()


def notes(values: list[float]) -> AbstractCallback:
    """Return a callback of a class whose outer variables are of this call."""
    count = 0

    class Notes(AbstractCallback):
        begun = 0

        def on_batch_end(self) -> None:
            nonlocal count
            count += 1
            Notes.begun += 1
            values.append(float(count))

    return Notes()


@pytest.mark.long
def test_a_container_that_grows_past_the_length_of_data_comes_back() -> None:
    model = Net()
    model.seen = []  # type: ignore[assignment]
    losses[:] = [0.0] * 995

    class Grows(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("grows")
            self.own: dict[int, float] = dict.fromkeys(range(995), 0.0)

        def on_batch_end(self) -> None:
            self.own[len(self.own)] = 1.0
            losses.append(1.0)

    callback = Grows()
    make_loop(model, validation=False, gpu_mode="ddp", accelerator="cpu", devices=1).fit(
        num_epochs=2, callbacks=[callback]
    )
    assert len(callback.own) == len(losses) > 1000


@pytest.mark.long
def test_callbacks_of_one_function_have_variables_of_their_own() -> None:
    first: list[float] = []
    second: list[float] = []
    callbacks = [notes(first), notes(second)]
    make_loop(Net(), validation=False, gpu_mode="ddp", accelerator="cpu", devices=1).fit(
        num_epochs=1, callbacks=callbacks
    )
    assert first == second == [float(i + 1) for i in range(len(first))]
    assert len(first) == type(callbacks[0]).begun == type(callbacks[1]).begun > 0  # type: ignore[attr-defined]


@pytest.mark.long
def test_an_outer_variable_does_not_replace_a_global_of_its_name() -> None:
    def begins() -> AbstractCallback:
        note = None

        class Begins(AbstractCallback):
            def on_epoch_end(self) -> None:
                nonlocal note
                note = 1.0

        return Begins("begins")

    before = note
    make_loop(validation=False, gpu_mode="ddp", accelerator="cpu", devices=1).fit(num_epochs=1, callbacks=[begins()])
    assert note is before


@pytest.mark.long
def test_what_this_process_changes_meanwhile_stays() -> None:
    class Appends(AbstractCallback):
        def on_epoch_end(self) -> None:
            losses.append(1.0)

    losses.clear()
    ended = threading.Event()

    def progress() -> None:
        while not ended.wait(0.05):
            losses.append(-1.0)

    thread = threading.Thread(target=progress)
    thread.start()
    make_loop(Net(), validation=False, gpu_mode="ddp", accelerator="cpu", devices=1).fit(
        num_epochs=1, callbacks=[Appends()]
    )
    ended.set()
    thread.join()
    assert set(losses) == {-1.0}


_opened = False
_file: Any = None


@pytest.mark.long
def test_a_flag_of_what_a_rank_has_does_not_come_back(tmp_path: Path) -> None:
    class Writes(AbstractCallback):
        def on_epoch_end(self) -> None:
            global _opened, _file
            if not _opened:
                _opened, _file = True, (tmp_path / "log").open("w")
            _file.write("epoch")

    make_loop(Net(), validation=False, gpu_mode="ddp", accelerator="cpu", devices=1).fit(
        num_epochs=1, callbacks=[Writes()]
    )
    assert (_opened, _file) == (False, None)


SHARED = """
from torch.utils.data import TensorDataset

class Settings:
    def __init__(self):
        self.scale, self.bank = 1.0, []

class Rows(TensorDataset):
    offset = 0

SETTINGS, TABLE, MODELS, data = Settings(), {"n": 0}, {}, None
OF_ALL = [SETTINGS]

def step():
    SETTINGS.scale += 1
    OF_ALL[0].bank.append(SETTINGS.scale)
    TABLE["n"] += 1
    data.offset += 1
    MODELS["student"].passes += 1
"""


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=[needs_fsdp_on_cpu, pytest.mark.long])])
@pytest.mark.filterwarnings("ignore:tl.train_loader")  # its offset does not come back
def test_a_modules_variable_is_the_object_that_the_loop_has(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"shared_in_{mode}"
    (tmp_path / f"{name}.py").write_text(SHARED)
    monkeypatch.syspath_prepend(tmp_path)
    shared = importlib.import_module(name)
    net = Net()
    net.passes, net.settings, net.table, net.seen = 0, shared.SETTINGS, shared.TABLE, None
    shared.MODELS["student"] = net
    loop = make_loop(net, validation=False, gpu_mode=mode, devices=2)
    shared.data = data = shared.Rows(*loop.train_loader.dataset.tensors)
    loop.train_loader = torch.utils.data.DataLoader(data, batch_size=16)

    class Steps(AbstractCallback):
        def on_epoch_end(self) -> None:
            importlib.import_module(name).step()
            net = self.train_loop_obj.model
            data = self.train_loop_obj.train_loader.dataset
            net.seen = (net.settings.scale, list(net.settings.bank), net.table["n"], data.offset, net.passes)

    loop.fit(num_epochs=2, callbacks=[Steps()])
    assert net.seen == (3.0, [2.0, 3.0], 2, 2, 2)
    assert (shared.SETTINGS, shared.TABLE, shared.OF_ALL[0]) == (net.settings, net.table, net.settings)
    assert (net.settings.scale, net.table, net.passes) == (3.0, {"n": 2}, 2)
    loop.fit(num_epochs=1, callbacks=[Steps()])
    assert net.seen == (4.0, [2.0, 3.0, 4.0], 3, 1, 3)


class Counts(logging.Filter):
    records = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.records += 1
        return False


def test_a_filter_and_a_hook_of_all_modules_are_those_that_callbacks_have() -> None:
    counts, kinds = Counts(), []

    def note_kind(module: torch.nn.Module, args: Any, output: Any) -> None:
        kinds.append(type(module).__name__)

    class Reads(AbstractCallback):
        def on_train_end(self) -> None:
            logging.getLogger("of_the_script").warning("counted")
            self.seen = self.filter.records, "Linear" in kinds

    reads = Reads()
    reads.filter = counts  # type: ignore[attr-defined]
    log, handle = logging.getLogger("of_the_script"), torch.nn.modules.module.register_module_forward_hook(note_kind)
    log.addFilter(counts)
    try:
        make_loop(Net(), validation=False, gpu_mode="ddp", devices=2).fit(num_iterations=1, callbacks=[reads])
    finally:
        log.removeFilter(counts)
        handle.remove()
    assert reads.seen == (1, True)
    assert reads.filter is counts  # type: ignore[attr-defined]
    assert counts.records == 1
