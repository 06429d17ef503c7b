"""Callbacks: their order, which hooks are called and with what, and the messages they leave for each other."""

from __future__ import annotations

import inspect
import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, Raises, Scores, make_loop
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainloop import AbstractCallback
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    LRScheduler,
    ModelCheckpoint,
    ModelPerformanceEvaluation,
    StochasticWeightAveraging,
)
from trainloop.callbacks.base import HookTable, warn_of_misnamed_hooks
from trainloop.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*by its name, (lower|higher) is better")


class Notes(AbstractCallback):
    """Writes down its name when an epoch ends."""

    def __init__(self, notes: list[str], name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self.notes = notes

    def on_epoch_end(self) -> None:
        self.notes.append(self.callback_name)


# -- which, and in which order -----------------------------------------------------------------------------------------


def test_order_is_execution_order_then_as_passed() -> None:
    notes: list[str] = []
    orders = {"c": 5, "a": -1, "d": 5, "b": 0}
    table = HookTable([Notes(notes, name, execution_order=order) for name, order in orders.items()])
    for hook in table.on_epoch_end:
        hook()
    assert notes == ["a", "b", "c", "d"]


def test_a_hook_nobody_overrides_is_empty() -> None:
    table = HookTable([Notes([], "a"), AbstractCallback()])
    assert {name: len(getattr(table, name)) for name in AbstractCallback.HOOKS if getattr(table, name)} == {
        "on_epoch_end": 1
    }


def test_inherited_and_borrowed_hooks_count() -> None:
    class Mixin:
        def on_batch_end(self) -> None:
            pass

    class Both(Mixin, Notes):
        pass

    callback = Both([], "both")
    callback.on_train_end = lambda: None  # type: ignore[method-assign]  # set on the instance
    assert [name for name in AbstractCallback.HOOKS if callback.uses_hook(name)] == [
        "on_batch_end",
        "on_epoch_end",
        "on_train_end",
    ]
    table = HookTable([callback])
    assert len(table.on_batch_end) == len(table.on_epoch_end) == len(table.on_train_end) == 1


@pytest.mark.parametrize("restricted_to, rank, runs", [(None, 3, True), (0, 0, True), (0, 1, False), (1, 1, True)])
def test_a_callback_may_be_restricted_to_a_rank(restricted_to: int | None, rank: int, runs: bool) -> None:
    table = HookTable([Notes([], "a", device_idx_execution=restricted_to)], rank)
    assert bool(table.on_epoch_end) is runs


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"no hook 'on_epoch_ends'; hooks are on_train_loop_registration, "):
        HookTable([]).on_epoch_ends  # noqa: B018


# -- with which arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, given",
    [
        (lambda self: "none", "none"),
        (lambda self, y_pred: y_pred, 1),
        (lambda self, y_pred, y_true, metadata: (y_pred, y_true, metadata), (1, 2, 3)),
        (lambda self, a, b, c, d: (a, b, c, d), (1, 2, 3, 4)),
        (lambda self, a, *rest: (a, rest), (1, (2, 3, 4))),
        (lambda self, *everything, **more: (everything, more), ((1, 2, 3, 4), {})),
        (lambda self, a, b=None, *, extra="default": (a, b, extra), (1, 2, "default")),
        (lambda self, a, b, c, d, e="more": (a, b, c, d, e), (1, 2, 3, 4, "more")),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, int, tuple)) else "",
)
def test_a_hook_may_take_fewer_arguments(function: Any, given: Any) -> None:
    callback = type("Custom", (AbstractCallback,), {"on_after_batch_prediction": function})()
    (hook,) = HookTable([callback]).on_after_batch_prediction
    assert hook(1, 2, 3, 4) == given


def test_a_builtin_without_a_signature_gets_everything() -> None:
    callback = AbstractCallback()
    callback.on_log = print  # type: ignore[method-assign]
    assert len(HookTable([callback]).on_log) == 1


async def _asynchronous(self: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    "name, function, message",
    [
        (
            "on_epoch_end",
            lambda self, epoch: None,
            r"Custom.on_epoch_end\(self, epoch\) does not accept the arguments that the loop passes. "
            r"Define it as on_epoch_end\(self\)",
        ),
        ("on_log", lambda self, rows, *, step: None, r"Custom.on_log\(self, rows, \*, step\) does not accept the arg"),
        ("on_exception", lambda self, *, error: None, r"Define it as on_exception\(self, exception"),
        ("on_epoch_end", lambda: None, r"Custom.on_epoch_end\(\) does not accept .* Define it as on_epoch_end\(self\)"),
        ("on_epoch_end", None, r"Custom.on_epoch_end is None, which can't be called"),
        (
            "on_epoch_end",
            _asynchronous,
            r"Custom.on_epoch_end is async or contains yield, so calling",
        ),
    ],
    ids=["too many", "keyword", "keyword only", "no self", "no function", "async"],
)
def test_a_hook_that_can_not_be_called_is_refused_at_registration(name: str, function: Any, message: str) -> None:
    callback = type("Custom", (AbstractCallback,), {name: function})()
    with pytest.raises(ConfigurationError, match=message):
        callback.register_train_loop_object(object())
    with pytest.raises(ConfigurationError, match=message):
        make_loop().fit(num_epochs=1, callbacks=[callback])


def test_every_hook_is_a_method_with_a_docstring() -> None:
    hooks = [name for name in dir(AbstractCallback) if name.startswith("on_")]
    assert sorted(AbstractCallback.HOOKS) == sorted(hooks)
    assert all(inspect.getdoc(getattr(AbstractCallback, name)) for name in hooks)


# -- methods that are taken for hooks ----------------------------------------------------------------------------------


def hook_warnings(model: Any = None, *callbacks: AbstractCallback) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_loop(model).fit(num_epochs=1, callbacks=list(callbacks))
    return [str(warning.message) for warning in caught if warning.filename == __file__]


def nothing(self: Any, *_: Any) -> None:
    pass


@pytest.mark.parametrize(
    "name, here",
    [
        ("on_epoch_ends", "hook has this name. Did you mean on_epoch_end?"),
        ("on_train_batch_end", "hook has this name. Did you mean on_batch_end?"),
        ("on_validation_epoch_end", "hook has this name. Did you mean on_evaluation_end?"),
        ("on_save_checkpoint", "method has this name. Did you mean state_dict?"),
    ],
)
def test_a_misnamed_hook_is_told_once(name: str, here: str) -> None:
    kind = type("Custom", (AbstractCallback,), {name: nothing, "on_epoch_end": nothing})
    assert hook_warnings(None, kind(), kind()) == [f"Custom.{name} is not called by fit: no {here}"]
    assert hook_warnings(None, type("Derived", (kind,), {})()) == [f"Derived.{name} is not called by fit: no {here}"]
    assert not hook_warnings(None, kind())


def test_a_models_misnamed_hook_is_told() -> None:
    model: Any = type("Custom", (Net,), {"on_train_epoch_start": nothing, "on_epoch_end": nothing})()
    first, second = hook_warnings(model)
    assert (
        first == "Custom.on_train_epoch_start is not called by fit: no hook has this name. Did you mean on_epoch_begin?"
    )
    assert second.startswith("Custom.on_epoch_end is not called by fit: a model's hooks are on_epoch_begin, ")


def test_methods_that_somebody_calls_are_no_misnamed_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        def on_test_end(self) -> None:
            """Of another library, which calls it."""

    class Own(Foreign, AbstractCallback):
        on_device = 3

        def on_test_end(self) -> None:
            super().on_test_end()

        def on_request(self) -> None:
            """Near to no hook."""

        on_eval_end = property(on_request)

    model = Net()
    assert not hook_warnings(model, Own())
    # Of a launcher's ranks, which all come by, one speaks.
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_misnamed_hooks([type("Custom", (AbstractCallback,), {"on_epoch_ends": nothing})()], model)


# -- in the loop -------------------------------------------------------------------------------------------------------


class Everything(AbstractCallback):
    """Writes down each hook, in order."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__("everything")
        self.heard = heard


def _noting(name: str) -> Any:
    def hook(self: Everything, *arguments: Any) -> None:
        self.heard.append(name)

    return hook


for _name in AbstractCallback.HOOKS:
    setattr(Everything, _name, _noting(_name))


def test_hooks_come_in_order() -> None:
    heard: list[str] = []
    make_loop().fit(num_iterations=4, grad_accumulation=2, callbacks=[Everything(heard)])
    micro_batch = ["on_batch_begin", "on_batch_end"]
    last = ["on_batch_begin", "on_after_gradient_update", "on_after_optimizer_step", "on_batch_end"]
    assert heard == [
        "on_train_loop_registration",
        "on_multiprocess_start",
        "on_train_begin",
        "on_epoch_begin",
        *(micro_batch + last) * 2,
        "on_log",
        "on_evaluation_begin",
        "on_evaluation_end",
        "on_epoch_end",
        "on_train_end",
    ]


def test_an_exception_is_told_and_goes_on() -> None:
    heard: list[str] = []
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        make_loop().fit(num_epochs=1, callbacks=[Raises(ZeroDivisionError("on purpose")), Everything(heard)])
    assert heard[-1] == "on_exception"
    assert "on_train_end" not in heard


def test_a_callback_knows_its_loop() -> None:
    class Looks(AbstractCallback):
        def on_train_loop_registration(self) -> None:
            self.at_registration = self.train_loop_obj

    tl, looks = make_loop(), Looks()
    tl.fit(num_iterations=1, callbacks=[looks])
    assert looks.at_registration is tl
    assert looks.callback_name == "Looks"
    assert repr(looks) == "Looks(execution_order=0)"
    assert looks.state_dict() == {}


def test_a_callback_of_a_running_loop_is_not_shared_with_an_inner_one() -> None:
    class Inner(AbstractCallback):
        def on_batch_end(self) -> None:
            make_loop().fit(num_iterations=1, callbacks=[shared])

    shared = EarlyStopping("loss", patience=9)
    message = "the callback 'EarlyStopping' is used by another loop, which is running. Create another callback"
    with pytest.raises(ConfigurationError, match=message):
        make_loop().fit(num_epochs=1, callbacks=[shared, Inner()])
    make_loop().fit(num_epochs=1, callbacks=[shared])


@dataclass
class Counts(AbstractCallback):
    """Counts batches; a dataclass, whose __init__ does not call AbstractCallback's."""

    batches: int = 0

    def on_batch_end(self) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


@pytest.mark.parametrize("gpu_mode", ["single", pytest.param("ddp", marks=pytest.mark.long)])
def test_callbacks_need_not_call_the_init_of_their_base(tmp_path: Path, gpu_mode: str) -> None:
    ranks = {"gpu_mode": gpu_mode, "devices": 2} if gpu_mode == "ddp" else {}
    counts, saved = Counts(), ModelCheckpoint(tmp_path)
    tl = make_loop(**ranks)
    tl.fit(num_epochs=1, callbacks=[counts, saved])
    once = counts.batches
    tl.fit(num_epochs=1, callbacks=[counts, saved])
    assert counts.callback_name == "Counts"
    assert counts.batches == 2 * once > 0
    resumed = Counts()
    make_loop(**ranks).fit(num_epochs=2, callbacks=[resumed, saved], resume_from="last")  # of the second fit
    assert resumed.batches == 3 * once


def test_a_name_that_is_an_attribute_of_the_class_is_kept() -> None:
    class Named(AbstractCallback):
        callback_name = "mine"

        def __init__(self) -> None:
            pass

    assert Named().callback_name == "mine"


def test_an_override_of_registration_is_kept() -> None:
    """Old code overrides register_train_loop_object and calls super()."""

    class Old(AbstractCallback):
        def register_train_loop_object(self, train_loop_obj: Any) -> Any:
            self.before = self.train_loop_obj
            return super().register_train_loop_object(train_loop_obj)

    old, tl = Old(), make_loop()
    assert old.register_train_loop_object(tl) is old
    assert (old.before, old.train_loop_obj) == (None, tl)


def test_attributes_with_names_of_a_checkpoint_s_methods_are_the_users() -> None:
    class Named(AbstractCallback):
        save_due = save_now = save_finished = True
        stops = False

        def on_batch_end(self) -> None:
            if self.stops:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_end(self) -> None:
            self.ended = True

    callback = Named("named")
    make_loop().fit(num_epochs=1, callbacks=[callback])
    assert callback.ended
    callback.stops = True
    with pytest.raises(SystemExit, match="143"):
        make_loop().fit(num_epochs=1, callbacks=[callback])


def test_what_is_registered_is_a_callback() -> None:
    with pytest.raises(ConfigurationError, match=r"callbacks\[0\]=3: must be an instance of AbstractCallback"):
        make_loop().register_callback(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name, value", [("shared", {"a": 1}), ("shared", "log_dir"), ("state_key", 3)])
def test_an_attribute_that_the_loop_reads_has_no_other_meaning(name: str, value: Any) -> None:
    callback = AbstractCallback("mine")
    setattr(callback, name, value)
    with pytest.raises(ConfigurationError, match=rf"AbstractCallback\.{name}=.*Use another name"):
        make_loop().fit(num_epochs=1, callbacks=[callback])


@pytest.mark.filterwarnings("ignore:StochasticWeightAveraging.* in the middle")
@pytest.mark.parametrize("first", [[0.1], [0.1, 0.05, 0.02, 0.01]], ids=len)
def test_callbacks_of_one_loop_can_be_used_in_another(tmp_path: Path, first: list[float | None]) -> None:
    """As in a cross-validation: the second loop has the results that it would have with new callbacks."""

    def callbacks(name: str) -> list[Any]:
        return [
            EarlyStopping("score", patience=2, mode="min"),
            LRScheduler(ReduceLROnPlateau, monitor="score", patience=0),
            LRScheduler(StepLR, step_size=1, interval="step", frequency=2),
            ExponentialMovingAverage(0.5),
            StochasticWeightAveraging(swa_lr=0.01, start=1, apply_on_train_end=False),
            ModelCheckpoint(tmp_path / name, monitor="score", mode="min", keep=1),
        ]

    def fit(seed: int, scores: list[float | None], taken: list[Any]) -> Any:
        torch.manual_seed(seed)
        tl = make_loop(Net(), seed=1)
        tl.fit(num_epochs=len(scores), callbacks=[Scores(scores), *taken])
        average, keeper = taken[-2:]
        weights = [*tl.model.parameters(), *average.average.values()]
        assert keeper.best_path is not None
        epoch = keeper.load_best()["place"]["epoch"]
        plateau = taken[1].scheduler.last_epoch
        return (
            tl.history.to_dict(),
            [weight.tolist() for weight in weights],
            tl.optimizer.param_groups[0]["lr"],
            epoch,
            plateau,
        )

    used = callbacks("used")
    fit(0, first, used)
    assert fit(5, [5.0, 6.0, 4.0], used) == fit(5, [5.0, 6.0, 4.0], callbacks("new"))


def test_an_override_of_a_hook_that_only_some_settings_need_is_called() -> None:
    """Also if its class of this package would leave the hook out."""
    calls = []

    class Own(ModelPerformanceEvaluation):
        def on_batch_end(self) -> None:
            super().on_batch_end()
            calls.append(self.train_loop_obj.global_step)

    plain = ModelPerformanceEvaluation(["accuracy"], on_each_epoch=False)
    assert not plain.uses_hook("on_batch_end")
    loop = make_loop()
    loop.fit(num_epochs=1, callbacks=[Own(["accuracy"], on_each_epoch=False), plain])
    assert calls == list(range(1, STEPS_PER_EPOCH + 1))
