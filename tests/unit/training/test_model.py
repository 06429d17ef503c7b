"""The classes that a user writes: TTModel and its two helpers."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainloop import ModelWrap, TrainLoop, TTBasicModel, TTModel
from trainloop._metrics import LogCall, Recorder
from trainloop.errors import ConfigurationError

CPU = torch.device("cpu")


class Affine(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Any, offset: Any = 0.0) -> Any:
        return self.weight * x + offset


# -- TTModel -----------------------------------------------------------------------------------------------------------


def test_its_methods_must_be_written() -> None:
    class OnlyForward(TTModel):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match=r"get_loss.*get_predictions"):
        OnlyForward()  # type: ignore[abstract]
    assert TTModel.__abstractmethods__ == {"get_loss", "get_predictions"}


def test_loss_in_evaluation_is_the_loss_unless_written() -> None:
    class Own(Affine):
        def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return 7.0

    batch = (torch.ones(2), torch.zeros(2))
    assert Affine().get_loss_eval(batch, nn.MSELoss(), CPU).item() == 4.0
    assert Own().get_loss_eval(batch, nn.MSELoss(), CPU) == 7.0


def test_log_goes_to_whoever_listens() -> None:
    model = Affine()
    model.log("x", 1.0)  # nobody: nothing happens
    heard: list[Any] = []
    model.__dict__["_log_sink"] = lambda *call: heard.append(call)
    model.log("x", 1.0)
    model.log("y", 2.0, on_step=False, on_epoch=True, reduce="sum", sync_dist=False, batch_size=3, prog_bar=True)
    model.__dict__["_log_batch_size"] = 5  # a replica's part of the batch
    model.log("z", 3.0, rank_zero_only=True)
    model.log("z", 3.0, batch_size=0)
    assert heard == [
        ("x", 1.0, LogCall(), None),
        ("y", 2.0, LogCall(on_step=False, on_epoch=True, reduce="sum", sync_dist=False, prog_bar=True), 3),
        ("z", 3.0, LogCall(rank_zero_only=True), 5),
        ("z", 3.0, LogCall(), 0),
    ]


def test_options_are_passed_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Affine().log("x", 1.0, True)  # type: ignore[misc]


def test_copies_and_pickles_do_not_listen_along() -> None:
    model = Affine()
    recorder = Recorder()
    model.__dict__["_log_sink"] = recorder.log
    model.__dict__["_log_batch_size"] = 4
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.weight.item() == 2.0
        assert not {"_log_sink", "_log_batch_size"} & set(vars(other))
        other.log("x", 1.0)
    assert recorder.finish_epoch().metrics == {}


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    model, x = Affine(), torch.ones(1)
    model.compile(backend="eager")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(x).any()
    assert model(x).any()


def test_device() -> None:
    class Bare(Affine):
        def __init__(self) -> None:
            TTModel.__init__(self)

    assert Affine().device == CPU
    assert Affine().to("meta").device.type == "meta"
    assert Bare().device == CPU
    model = Bare()
    model.child = nn.BatchNorm1d(2, affine=False).to("meta")  # buffers alone
    assert model.device.type == "meta"


def test_a_replica_of_data_parallel_knows_its_device() -> None:
    model = Affine()
    replica = model._replicate_for_data_parallel()
    replica._former_parameters = {"weight": model.weight.to("meta")}
    assert replica.device.type == "meta"


def test_all_gather_in_one_process() -> None:
    gathered = Affine().all_gather({"a": torch.ones(3), "b": 2})
    assert gathered["a"].shape == (1, 3)
    assert gathered["b"].tolist() == [2]


def test_old_attribute_is_accepted() -> None:
    model = Affine()
    assert model.transfer_model_attributes == []
    model.transfer_model_attributes = ["weight"]


# -- TTBasicModel ------------------------------------------------------------------------------------------------------


def test_basic_model_takes_inputs_and_target() -> None:
    batch = [torch.ones(2), torch.ones(2), torch.zeros(2)]
    assert Affine().get_loss(batch, nn.MSELoss(), CPU).item() == 9.0
    y_pred, y_true, metadata = Affine().get_predictions(tuple(batch), CPU)
    assert y_pred.tolist() == [3.0, 3.0]
    assert y_true is batch[2]
    assert metadata == {}


@pytest.mark.parametrize(
    "batch, described",
    [
        (torch.ones(4, 2), "a Tensor"),
        ({"x": torch.ones(2), "y": torch.ones(2)}, "a dict"),
        ((torch.ones(2),), "a tuple of length 1"),
        ([], "a list of length 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_basic_model_refuses_other_batches(batch: Any, described: str) -> None:
    message = (
        rf"TTBasicModel needs batches \(\*inputs, target\), but got {described}. "
        "For other batches, subclass TTModel, and write get_loss and get_predictions."
    )
    for method, arguments in (("get_loss", (batch, nn.MSELoss(), CPU)), ("get_predictions", (batch, CPU))):
        with pytest.raises(ConfigurationError, match=message):
            getattr(Affine(), method)(*arguments)


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize("criterion", [None, "mse", [nn.MSELoss()]])
def test_basic_model_refuses_a_criterion_that_it_can_not_call(criterion: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"get_loss calls the criterion, but criterion is (None|'mse'|\[MSE)"):
        Affine().get_loss((torch.ones(2, 1), torch.ones(2, 1)), criterion, CPU)


def test_nested_inputs_move_to_the_device() -> None:
    seen: list[Any] = []

    class Sees(Affine):
        def forward(self, *inputs: Any) -> Tensor:
            seen.extend(inputs)
            return torch.zeros(1, device="meta")

    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    inputs = [torch.ones(1), {"a": [torch.ones(1), "text", 3]}, Pair(torch.ones(1), (torch.ones(1),)), packed]
    Sees().get_loss((*inputs, torch.zeros(1)), lambda y_pred, y_true: y_pred, torch.device("meta"))
    tensor, mapping, pair, sequence = seen
    assert tensor.is_meta
    assert mapping["a"][0].is_meta
    assert mapping["a"][1:] == ["text", 3]
    assert isinstance(pair, Pair)
    assert pair.left.is_meta
    assert pair.right[0].is_meta
    assert isinstance(sequence, PackedSequence)
    assert sequence.data.is_meta


# -- ModelWrap ---------------------------------------------------------------------------------------------------------


class Feed:
    def get_loss(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(model(batch_data["x"]), batch_data["y"])

    def get_predictions(self, model: nn.Module, batch_data: Any, device: torch.device) -> Any:
        return model(batch_data["x"]), batch_data["y"], {"id": batch_data["id"]}


class FeedWithEvaluation(Feed):
    def get_loss_eval(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return 2 * self.get_loss(model, batch_data, criterion, device)


def test_wrapped_module_is_fed_from_outside() -> None:
    module = nn.Linear(2, 1)
    batch = {"x": torch.ones(3, 2), "y": torch.zeros(3, 1), "id": [1, 2, 3]}
    model = ModelWrap(module, Feed())
    assert model.model is module
    assert torch.equal(model(batch["x"]), module(batch["x"]))
    loss = model.get_loss(batch, nn.MSELoss(), CPU)
    assert torch.equal(loss, nn.MSELoss()(module(batch["x"]), batch["y"]))
    assert torch.equal(model.get_loss_eval(batch, nn.MSELoss(), CPU), loss)
    assert torch.equal(ModelWrap(module, FeedWithEvaluation()).get_loss_eval(batch, nn.MSELoss(), CPU), 2 * loss)
    y_pred, y_true, metadata = model.get_predictions(batch, CPU)
    assert torch.equal(y_pred, module(batch["x"]))
    assert y_true is batch["y"]
    assert metadata == {"id": [1, 2, 3]}


def test_wrap_refuses_what_it_can_not_train() -> None:
    with pytest.raises(ConfigurationError, match=r"module=<function .*>: must be an nn.Module."):
        ModelWrap(lambda x: x, Feed())  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError,
        match=r"feed=<object .*> has no get_loss and no get_predictions. Add what is missing: see ModelWrap.",
    ):
        ModelWrap(nn.Linear(1, 1), object())


class Placed(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.device = CPU


class Hidden(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Linear(2, 2)


class Around(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.part = Hidden()


def test_device_is_not_set() -> None:
    with pytest.raises(ConfigurationError, match=r"Placed.device = device\(type='cpu'\): .* it can't be set. Leave"):
        Placed()


@pytest.mark.parametrize(
    ("cls", "what"), [(Hidden, "Hidden.log is a module"), (Around, r"Around.part.log is a module")]
)
def test_a_part_of_the_model_with_the_name_of_a_method_is_an_error(cls: type[TTModel], what: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{what}, but log is a member of TTModel"):
        TrainLoop(cls(), None)
