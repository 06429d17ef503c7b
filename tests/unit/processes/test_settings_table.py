"""The table of settings: each is read, written and read again, and the documentation lists it."""

from __future__ import annotations

import logging
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.torch_version import TorchVersion

from trainloop._launch.script import settings
from trainloop._launch.script.settings import (
    SETTINGS,
    Setting,
    apply_settings,
    dumped_settings,
    numeric_settings,
    read_settings,
)
from trainloop.checkpoint.plain import plain

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "pickling.rst"


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Through torch's own functions, not through what is tested."""
    precision, recursion = torch.get_float32_matmul_precision(), sys.getrecursionlimit()
    with warnings.catch_warnings():
        yield
    torch.set_float32_matmul_precision(precision)
    sys.setrecursionlimit(recursion)


def test_reading_changes_nothing_and_taking_over_ones_own_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any) -> None:
        raise AssertionError(value)

    values, there = read_settings(), dumped_settings()
    monkeypatch.setattr(settings, "SETTINGS", [Setting(s.name, s.read, refuse) for s in SETTINGS])
    apply_settings(there)
    monkeypatch.undo()
    assert read_settings() == values


THERE = read_settings()  # what this version of torch has


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.name in THERE], ids=lambda s: s.name)
def test_each_can_be_written_as_it_was_read(setting: Setting) -> None:
    value = setting.read()
    if value is None and "cudnn" in setting.name:  # cuDNN's, in a build without it
        assert not torch.backends.cudnn.is_available()
    setting.write(value)
    assert setting.read() == value
    if setting.name == "torch.set_default_device" and torch.__version__ < TorchVersion("2.8"):
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # None, which that version's get_default_device() can't read


def test_numeric_settings_can_be_written_into_a_record() -> None:
    assert plain(numeric_settings(), "settings") == numeric_settings()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_the_guide_lists_it(setting: Setting) -> None:
    assert setting.name.removeprefix("torch.") in GUIDE.read_text()


def test_old_and_new_precision_switches_both_arrive() -> None:
    torch.set_float32_matmul_precision("medium")
    old = dumped_settings()
    torch.set_float32_matmul_precision("highest")
    apply_settings(old)
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    if "torch.backends.mkldnn.matmul.fp32_precision" not in THERE:
        return  # an older PyTorch
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"  # torch refuses to read the old one now
        new = dumped_settings()
        matmul.fp32_precision = before
        apply_settings(new)
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before


def test_warning_filters_hold_at_once() -> None:
    class Mine(UserWarning):
        pass

    def warn() -> None:  # one place, which Python remembers to have warned at
        warnings.warn("now", Mine, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Mine)
        ignoring = dumped_settings()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default", Mine)
        warn()
        filters = warnings.filters
        apply_settings(ignoring)
        warn()
        assert warnings.filters is filters
    assert len(heard) == 1


def test_log_handlers_of_the_standard_streams_are_made_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("trainloop.test.settings")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("{levelname}-{message}", style="{"))
    log.addHandler(handler)
    try:
        there = dumped_settings()
        apply_settings(there)
        assert log.handlers == [handler]
        log.removeHandler(handler)
        apply_settings(there)
        log.error("once")
        assert capsys.readouterr().err == "ERROR-once\n"
    finally:
        log.handlers.clear()


class Brackets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"<{super().format(record)}>"


class Numbers(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.number = 7
        return "secret" not in record.getMessage()


def test_a_formatter_that_can_not_be_sent_is_replaced_by_the_default_one(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("trainloop.test.settings")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter := Brackets())
    formatter.stream = sys.stderr  # type: ignore[attr-defined]  # as colorlog's, which optuna uses
    formatter.lock = threading.Lock()  # type: ignore[attr-defined]
    log.addHandler(handler)
    try:
        there = dumped_settings()
        log.handlers.clear()
        apply_settings(there)
        log.error("shown")
        assert capsys.readouterr().err == "shown\n"
    finally:
        log.handlers.clear()


def test_formatters_filters_and_record_factories_of_the_user_arrive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", before := logging.getLogRecordFactory())

    def factory(*args: Any, **more: Any) -> logging.LogRecord:
        record = before(*args, **more)
        record.run = "mine"
        return record

    log = logging.getLogger("trainloop.test.filters")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Brackets("%(run)s %(number)s %(message)s"))
    log.addHandler(handler)
    log.addFilter(Numbers())
    logging.setLogRecordFactory(factory)
    try:
        there = dumped_settings()
        log.handlers.clear()
        log.filters.clear()
        logging.setLogRecordFactory(before)
        apply_settings(there)
        log.error("shown")
        log.error("secret")
        assert capsys.readouterr().err == "<mine 7 shown>\n"
        apply_settings(there)
        assert len(log.filters) == 1
    finally:
        log.handlers.clear()
        log.filters.clear()


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def halved(module: nn.Module, args: Any) -> Any:
    return (args[0] / 8,)


def scaled(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return output * 10


def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2


def test_hooks_of_every_module_and_optimizer_are_registered_there_once() -> None:
    def register() -> list[Any]:
        return [
            modules.register_module_forward_pre_hook(halved),
            modules.register_module_forward_hook(doubled),
            modules.register_module_forward_hook(scaled, with_kwargs=True, always_call=True),
            optimizers.register_optimizer_step_post_hook(stepped),
        ]

    def added_to(known: list[Any]) -> list[Any]:
        return [hook for hook in settings._read_hooks_of_all() if hook not in known]

    named = [*vars(modules).items(), *vars(optimizers).items()]
    registries = [found for name, found in named if name.startswith("_global_") and isinstance(found, dict)]
    known = [set(found) for found in registries]
    before, without = settings._read_hooks_of_all(), dumped_settings()
    handles, x = register(), torch.ones(1)
    try:
        there, here = dumped_settings(), added_to(before)
        assert len(here) == 4
        assert nn.Identity()(x) == 2.5
        for handle in handles:
            handle.remove()
        assert nn.Identity()(x) == 1
        for _ in range(2):
            apply_settings(there)
            assert nn.Identity()(x) == 2.5
            sgd = torch.optim.SGD([nn.Parameter(x)], lr=1.0)
            sgd.step()
            assert sgd.param_groups[0]["lr"] == 2
            assert added_to(before) == here
        apply_settings(without)  # as in a kept rank, after the caller has removed its hooks
        assert added_to(before) == []
    finally:
        for found, own in zip(registries, known, strict=True):
            for number in found.keys() - own:
                del found[number]


def test_what_cannot_be_sent_is_told_and_the_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Setting("a.lock", lambda: (x for x in ()), print)
    monkeypatch.setattr(settings, "SETTINGS", [bad, *SETTINGS])
    sys.setrecursionlimit(4321)
    with pytest.warns(UserWarning, match=r"this process's a\.lock can't be sent to other processes \(.*generator"):
        there = dumped_settings()
    sys.setrecursionlimit(1234)
    apply_settings(there)
    assert sys.getrecursionlimit() == 4321


def test_only_changed_options_of_a_library_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "matplotlib.rcParams", "pandas.set_option", "sklearn.set_config"
    of_libraries = [setting for setting in SETTINGS if setting.name in names]
    monkeypatch.setattr(settings, "SETTINGS", of_libraries)
    library = types.SimpleNamespace(rcParams={"dpi": 100, "size": 1}, rcParamsDefault={"dpi": 100, "size": 2})
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace())  # another version
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    assert read_settings() == {"matplotlib.rcParams": {"size": 1}, "pandas.set_option": {}, "sklearn.set_config": {}}
    there = dumped_settings()
    library.rcParams.update(dpi=200, size=2)
    apply_settings(there)
    assert library.rcParams == {"dpi": 100, "size": 1}  # as in a kept rank, after the caller has set the dpi back
    assert "sklearn" not in sys.modules  # not imported for nothing


def test_what_cannot_be_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any) -> None:
        raise ValueError("no such engine")

    monkeypatch.setattr(settings, "SETTINGS", [Setting("some.engine", lambda: 1, refuse)])
    with pytest.warns(UserWarning, match=r"could not apply the setting some\.engine=2 of .*: no such engine"):
        settings.write_settings({"some.engine": 2})
