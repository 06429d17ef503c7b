"""Names: those that type checkers read are those there are, and those of other libraries get the ones used here."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.small_loop import Net, make_loop
from torch.utils.data import DataLoader, TensorDataset

import trainloop
from trainloop import (
    AbstractCallback,
    TrainLoop,
    TTDataParallel,
    TTDistributedDataParallel,
    TTFullyShardedDataParallel,
    TTModel,
    callbacks,
)
from trainloop._support import keywords
from trainloop._support.keywords import keywords_of
from trainloop.distributed import Rank
from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota, plan
from trainloop.tabular import TabularPredictor
from trainloop.train_loop.arguments.run_config import RunConfig, run_config_under_launcher
from trainloop.tuning import tune


def typed_names(module: Any) -> set[str]:
    """Imported under ``if TYPE_CHECKING:``."""
    tree = ast.parse(Path(module.__file__).read_text())
    return {
        alias.name
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_type_checkers_read_the_names_there_are() -> None:
    assert typed_names(trainloop) == set(trainloop._HOMES) == set(trainloop.__all__)
    always_imported = {"PredictionStream", "TrainLoop"}
    assert typed_names(trainloop.train_loop) == set(trainloop.train_loop.__all__) - always_imported
    for name in callbacks.__all__:
        assert callable(getattr(callbacks, name)), name


KEYWORDS = {
    "val_loader": "validation_loader=",
    "strategy": "gpu_mode=",
    "max_epochs": "fit(num_epochs=...)",
    "epochs": "fit(num_epochs=...)",
    "precision": "use_amp=",
    "callbacks": "fit(callbacks=",
    "logger": "TensorBoard",
    "ckpt_path": "fit(resume_from=",
    "accumulate_grad_batches": "fit(grad_accumulation=...)",
    "num_epochs": "fit(num_epochs=",
    "optimiser": "optimizer=",
    "resume_form": "fit(resume_from=",
}
FIT_KEYWORDS = {
    "epochs": "mean num_epochs=?",
    "ckpt_path": "mean resume_from='last' or a path?",
    "gpu_mode": "TrainLoop(gpu_mode=",
    "precision": "TrainLoop(use_amp=",
    "val_loader": "TrainLoop(validation_loader=",
    "num_epoch": "num_epochs=",
    "zzz": "Its arguments: num_epochs, num_iterations, callbacks",
}


@pytest.mark.parametrize("name, meant", KEYWORDS.items(), ids=str)
def test_a_wrong_keyword_of_the_loop_says_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_loop(**{name: None})
    assert isinstance(caught.value, TypeError)  # as of every function
    assert f"TrainLoop() got an unexpected keyword argument '{name}'" in str(caught.value)
    assert meant in str(caught.value)


@pytest.mark.parametrize("name, meant", FIT_KEYWORDS.items(), ids=str)
def test_a_wrong_keyword_of_fit_says_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_loop().fit(**{"num_epochs": 1, name: 3})
    assert f"fit() got an unexpected keyword argument '{name}'" in str(caught.value)
    assert meant in str(caught.value)


def test_every_hint_names_what_there_is() -> None:
    """A hint that leads to another unknown name would be worse than none."""
    classes = [value for name in callbacks.__all__ if isinstance(value := getattr(callbacks, name), type)]
    wrappers = [TTDataParallel, TTDistributedDataParallel, TTFullyShardedDataParallel]
    functions = [TrainLoop.__init__, TrainLoop.fit, tune, plan, ResourceQuota, TabularPredictor.fit]
    signatures = [set(inspect.signature(f).parameters) for f in (*functions, *classes)]
    signatures += [set(keywords_of(wrapper)) for wrapper in wrappers]
    known = set().union(*signatures)
    assert "unknown" not in known
    for foreign, *here in keywords._ROWS:
        for alternative in here:
            argument = re.match(r"\w+", alternative)[0]  # type: ignore[index]
            assert argument in known, alternative
            assert any(argument in own and set(foreign.split()) - own for own in signatures), (foreign, alternative)
    loop = make_loop()
    for known, here in keywords.ATTRIBUTES.items():
        assert not [name for name in known.split() if hasattr(loop, name)], known
        first = here.replace("loop.", "").split("(")[0].split(" ")[0].split(".")[0].rstrip(",")
        assert first == "torch" or hasattr(loop, first), here


def test_keywords_of_a_predictor_of_tables() -> None:
    with pytest.raises(ConfigurationError, match=r"it belongs to fit\(verbosity=\.\.\.\)"):
        TabularPredictor("label", verbosity=0)
    with pytest.raises(ConfigurationError, match="Did you mean tuning_data="):
        TabularPredictor("label").fit(None, val_data=None)


@pytest.mark.parametrize("name, here", [("test", "predict_on_test_set()"), ("validate", "validation_set()")])
def test_an_attribute_of_other_loops_says_the_one_here(name: str, here: str) -> None:
    loop = make_loop()
    with pytest.raises(AttributeError) as caught:
        getattr(loop, name)
    assert f"has no attribute '{name}'" in str(caught.value)
    assert here in str(caught.value)
    assert not hasattr(loop, "nothing_of_the_sort")


class Ported(Net):
    """Uses names of another library's."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.keywords = keywords

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        if self.keywords:
            self.log("accuracy", 1.0, **self.keywords)
        self.log("epoch", float(self.current_epoch))
        return super().get_loss(batch_data, criterion, device)


class PortedCallback(AbstractCallback):
    def on_train_begin(self) -> None:
        self.trainer.should_stop = True  # type: ignore[attr-defined]


def ported_loop(mode: str = "single", **keywords: Any) -> TrainLoop[Any]:
    model = Ported(**keywords)
    rows = TensorDataset(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cpu_loop(model, DataLoader(rows, 2), optimizer, gpu_mode=mode, devices=2)


def test_an_attribute_of_other_libraries_models_and_callbacks_says_the_one_here() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'current_epoch'.*self\.train_loop_obj in a callback"):
        ported_loop().fit(num_epochs=1)
    with pytest.raises(AttributeError, match=r"no attribute 'current_epoch'\. The equivalent here is"):
        ported_loop("dp").fit(num_epochs=1)  # raised again by the thread of a replica
    with pytest.raises(AttributeError, match=r"no attribute 'trainer'\. The equivalent here is self\.train_loop_obj"):
        ported_loop().fit(num_epochs=1, callbacks=[PortedCallback()])
    model, callback = TTModel, AbstractCallback
    assert not [name for names in keywords.MODEL_ATTRIBUTES for name in names.split() if hasattr(model, name)]
    assert not [name for names in keywords.CALLBACK_ATTRIBUTES for name in names.split() if hasattr(callback, name)]
    loop = make_loop()
    attributes = [re.findall(r"train_loop_obj\.(\w+)", here) for here in keywords.CALLBACK_ATTRIBUTES.values()]
    assert all(hasattr(loop, name) for names in attributes for name in names)


@pytest.mark.parametrize("keyword", [name for names in keywords.LOG_KEYWORDS for name in names.split()])
def test_a_keyword_of_other_libraries_log_says_what_to_do(keyword: str) -> None:
    with pytest.raises(TypeError, match=f"'{keyword}'. (Leave it out|Pass reduce)"):
        ported_loop(**{keyword: None}).fit(num_epochs=1)


def test_a_property_that_fails_shows_its_own_error() -> None:
    class Loop(TrainLoop[Any]):
        @property
        def broken(self) -> Any:
            return self.model.no_such_layer

    loop = Loop(make_loop().model, None)
    with pytest.raises(AttributeError, match="no_such_layer"):
        loop.broken  # noqa: B018
    again = pickle.loads(pickle.dumps(make_loop()))  # the attributes of an object that is being made
    assert again.gpu_mode == "single"


@pytest.mark.parametrize(
    "use_amp, word", [(False, None), (True, "bf16"), ("fp16", "fp16"), ({"growth_interval": 5}, "fp16")]
)
def test_the_loop_says_its_mode_devices_precision_batch_and_quota(use_amp: Any, word: str | None) -> None:
    text = repr(make_loop(use_amp=use_amp, gpu_mode="dp", devices=2, resources=ResourceQuota(num_cpus=1)))
    assert text.startswith("TrainLoop(dp on 2 x cpu")
    assert "effective batch 16" in text
    assert "num_cpus=1" in text
    assert (f"AMP {word}" in text) if word else ("AMP" not in text)


@pytest.mark.parametrize("devices, warns", [(2, False), (3, True), ("3", True), ("auto", False), (-1, False)])
def test_devices_that_differ_from_what_torchrun_started_are_said_once_a_host(devices: Any, warns: bool) -> None:
    asked = 1 if devices in ("auto", -1) else int(devices)
    config = RunConfig("ddp", [torch.device("cpu")] * asked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configs = [run_config_under_launcher(config, devices, Rank(rank, 2, rank, 2, 0, 1)) for rank in range(2)]
    assert all(len(launched.devices) == 2 for launched in configs)
    said = [str(warning.message) for warning in caught]
    assert len(said) == warns
    assert all("devices=" in text and "--nproc-per-node 3" in text for text in said)


def test_the_former_name_of_the_run_s_configuration_warns() -> None:
    loop = make_loop()
    with pytest.warns(DeprecationWarning, match=r"tl\.site is now called tl\.run_config"):
        assert loop.site is loop.run_config
