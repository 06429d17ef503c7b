"""Synchronised BatchNorm between real ranks against one layer that is given the whole batch; and its undoing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.loops import cpu_loop
from kit.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTModel
from trainloop.errors import ConfigurationError
from trainloop.parallel.sync_batchnorm import CpuSyncBatchNorm, convert, participating, revert


class Activated(nn.BatchNorm2d):
    """A user's subclass that does more than normalise."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


CASES: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...], torch.dtype]] = {
    "1d": (nn.BatchNorm1d, {}, (), torch.float64),
    "1d with length": (nn.BatchNorm1d, {}, (4,), torch.float64),
    "2d": (nn.BatchNorm2d, {}, (3, 2), torch.float64),
    "3d": (nn.BatchNorm3d, {}, (3, 2, 2), torch.float64),
    "float32": (nn.BatchNorm2d, {}, (3, 2), torch.float32),
    "bfloat16": (nn.BatchNorm2d, {}, (3, 2), torch.bfloat16),
    "not affine": (nn.BatchNorm1d, {"affine": False}, (), torch.float64),
    "cumulative": (nn.BatchNorm1d, {"momentum": None}, (), torch.float64),
    "no statistics": (nn.BatchNorm1d, {"track_running_stats": False}, (), torch.float64),
    "subclass": (Activated, {}, (3, 2), torch.float64),
}
COUNTS = [5, 2]  # samples of each rank
CHANNELS = 3


def layer_of(case: str) -> nn.Module:
    cls, arguments, _, dtype = CASES[case]
    torch.manual_seed(0)
    layer = cls(CHANNELS, **arguments)
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer.to(dtype)


def whole_batch(case: str, step: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    _, _, shape, dtype = CASES[case]
    generator = torch.Generator().manual_seed(step)
    x = 100 + torch.randn(sum(counts), CHANNELS, *shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    if dtype == torch.bfloat16:
        x = x - 100  # it has three digits only
    return x.to(dtype), weights.to(dtype)


def run(layer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Any]:
    """Output, gradients and state after one forward and backward."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    (output * weights).sum().backward()
    return {
        "output": output.detach().double().tolist(),
        "input gradient": x.grad.double().tolist(),  # type: ignore[union-attr]
        "gradients": {name: p.grad.double().tolist() for name, p in layer.named_parameters() if p.grad is not None},
        "state": {name: t.double().tolist() for name, t in layer.named_buffers()},
    }


def part_of(rank: int, counts: list[int], *tensors: Tensor) -> list[Tensor]:
    begin = sum(counts[:rank])
    return [t[begin : begin + counts[rank]] for t in tensors]


def synchronised() -> dict[str, Any]:
    rank = dist.get_rank()
    facts: dict[str, Any] = {}
    for case in CASES:
        layer = convert(layer_of(case))
        for step in range(2):
            facts[case] = run(layer, *part_of(rank, COUNTS, *whole_batch(case, step, COUNTS)))
        layer.eval()
        facts[case, "eval"] = run(layer, *part_of(rank, COUNTS, *whole_batch(case, 2, COUNTS)))
    for counts in ([5, 0], [1, 1]):
        layer = convert(layer_of("2d"))
        facts[("counts", *counts)] = run(layer, *part_of(rank, counts, *whole_batch("2d", 0, counts)))

    layer = convert(layer_of("1d"))
    try:
        layer(torch.ones(1 - rank, CHANNELS, dtype=torch.float64))
    except ValueError as e:
        facts["one value"] = str(e)

    layer = convert(layer_of("1d"))
    x = torch.rand(3, CHANNELS, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    facts["first gradient"] = gradient.requires_grad
    try:
        gradient.square().sum().backward()
    except ConfigurationError as error:
        facts["second derivative"] = str(error)

    # Rank 1 has run out of batches, then comes back.
    layer = convert(layer_of("2d"))
    with participating([layer], [0]):
        if rank == 0:
            facts["alone"] = run(layer, *part_of(0, COUNTS, *whole_batch("2d", 0, COUNTS)))
    facts["statistics"] = [buffer.tolist() for buffer in layer.buffers()]
    with participating([layer], [1, 0]):
        facts["again"] = run(layer, *part_of(rank, COUNTS, *whole_batch("2d", 1, COUNTS)))["output"]
    facts["group restored"] = layer.process_group is None
    return facts


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(synchronised, 2, folder=tmp_path_factory.mktemp("ranks"))


def wide(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(
        wide(got),
        wide(expected),
        rtol=tolerance,
        atol=tolerance,
    )


def assert_is_the_whole(case: str, facts: list[Any], expected: dict[str, Any], counts: list[int]) -> None:
    dtype = CASES[case][3]
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for rank, mine in enumerate(facts):
        for key in ("output", "input gradient"):
            if counts[rank]:
                assert_close(mine[key], part_of(rank, counts, wide(expected[key]))[0].tolist(), tolerance)
        assert mine["state"].keys() == expected["state"].keys()
        for name, state in expected["state"].items():
            assert_close(mine["state"][name], state, tolerance)
    for name, gradient in expected["gradients"].items():
        total = sum(wide(mine["gradients"][name]) for mine in facts)
        assert_close(total.tolist(), gradient, 10 * tolerance)


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_are_one_layer(case: str, two_ranks: list[dict[Any, Any]]) -> None:
    layer = layer_of(case)
    for step in range(2):
        expected = run(layer, *whole_batch(case, step, COUNTS))
    assert_is_the_whole(case, [facts[case] for facts in two_ranks], expected, COUNTS)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_uses_the_running_statistics(case: str, two_ranks: list[dict[Any, Any]]) -> None:
    layer = layer_of(case)
    for step in range(2):
        run(layer, *whole_batch(case, step, COUNTS))
    layer.eval()
    if case == "no statistics":  # as torch's own: in evaluation each rank uses its own batch
        for rank, facts in enumerate(two_ranks):
            own = run(layer, *part_of(rank, COUNTS, *whole_batch(case, 2, COUNTS)))
            assert_close(facts[case, "eval"]["output"], own["output"], 1e-10)
        return
    expected = run(layer, *whole_batch(case, 2, COUNTS))
    assert_is_the_whole(case, [facts[case, "eval"] for facts in two_ranks], expected, COUNTS)


@pytest.mark.parametrize("counts", [[5, 0], [1, 1]], ids=str)
def test_ranks_may_hold_few_samples_or_none(counts: list[int], two_ranks: list[dict[Any, Any]]) -> None:
    expected = run(layer_of("2d"), *whole_batch("2d", 0, counts))
    assert_is_the_whole("2d", [facts[("counts", *counts)] for facts in two_ranks], expected, counts)


def test_one_value_over_all_ranks_is_refused(two_ranks: list[dict[Any, Any]]) -> None:
    for facts in two_ranks:
        assert facts["one value"] == "Expected more than 1 value per channel when training, got 1 over all ranks"


def test_a_gradient_penalty_through_it_is_an_error_that_says_what_to_use(two_ranks: list[dict[Any, Any]]) -> None:
    for facts in two_ranks:
        assert facts["first gradient"]
        assert "sync_batchnorm=True: a gradient penalty" in facts["second derivative"]


def test_only_ranks_that_participate_are_waited_for(two_ranks: list[dict[Any, Any]]) -> None:
    layer = layer_of("2d")
    alone = run(layer, *part_of(0, COUNTS, *whole_batch("2d", 0, COUNTS)))
    assert_close(two_ranks[0]["alone"]["output"], alone["output"], 1e-10)
    assert_close(two_ranks[0]["alone"]["input gradient"], alone["input gradient"], 1e-10)
    together = run(layer_of("2d"), *whole_batch("2d", 1, COUNTS))["output"]
    for rank, facts in enumerate(two_ranks):
        assert_close(facts["again"], part_of(rank, COUNTS, wide(together))[0].tolist(), 1e-10)
        assert facts["group restored"]


def test_a_rank_without_samples_has_the_statistics_of_the_others(two_ranks: list[dict[Any, Any]]) -> None:
    layer = layer_of("2d")
    run(layer, *part_of(0, COUNTS, *whole_batch("2d", 0, COUNTS)))
    for facts in two_ranks:
        for got, expected in zip(facts["statistics"], layer.buffers(), strict=True):
            assert_close(got, expected.tolist(), 1e-10)


# -- converting, in one process ----------------------------------------------------------------------------------------


def model_of_all() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 3, 1),
        nn.BatchNorm1d(3),
        nn.ModuleDict({"deep": nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm3d(3)), "mine": Activated(3)}),
        nn.InstanceNorm1d(3),
        nn.GroupNorm(1, 3),
    )


def test_convert_changes_the_class_and_nothing_else() -> None:
    model = model_of_all()
    layers, state = list(model.modules()), dict(model.state_dict(keep_vars=True))
    fired = []
    model[1].register_forward_hook(lambda *_: fired.append(True))
    assert convert(model) is model
    assert list(model.modules()) == layers
    after = dict(model.state_dict(keep_vars=True))
    assert after.keys() == state.keys()
    assert all(after[name] is state[name] for name in state)
    converted = [type(layer).__name__ for layer in layers if isinstance(layer, CpuSyncBatchNorm)]
    assert converted == ["SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d", "SyncActivated"]
    assert isinstance(model[1], nn.BatchNorm1d)
    assert isinstance(model[2]["mine"], Activated)
    x = torch.randn(4, 3, 5)
    expected = nn.BatchNorm1d(3)(x)
    torch.testing.assert_close(model[1](x), expected)  # one process: plain
    assert fired == [True]
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        model[1](torch.ones(2, 3, 4, 5))


def test_revert_undoes_it() -> None:
    model = model_of_all()
    classes = [type(layer) for layer in model.modules()]
    attributes = [set(vars(layer)) for layer in model.modules()]
    convert(model)
    convert(model)  # a second time is no harm
    assert revert(model) is model
    assert [type(layer) for layer in model.modules()] == classes
    assert [set(vars(layer)) for layer in model.modules()] == attributes
    revert(model)


def test_a_layer_alone_is_converted_too() -> None:
    layer = nn.BatchNorm2d(3)
    assert isinstance(convert(layer), CpuSyncBatchNorm)
    assert type(revert(layer)) is nn.BatchNorm2d


def test_torchs_own_synchronised_layers_are_left_alone() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    assert type(convert(model)[0]) is nn.SyncBatchNorm  # type: ignore[index]
    assert type(revert(model)[0]) is nn.SyncBatchNorm  # type: ignore[index]


def test_lazy_layers_need_a_batch_first() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ConfigurationError, match=r"sync_batchnorm: LazyBatchNorm1d has lazy tensors .*Run one batch"):
        convert(model)
    model(torch.randn(4, 3))
    assert isinstance(convert(model)[0], CpuSyncBatchNorm)  # type: ignore[index]
    assert type(revert(model)[0]) is nn.BatchNorm1d  # type: ignore[index]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_converted_model_is_copied_and_reverted(duplicate: Any) -> None:
    model = duplicate(convert(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3))))
    assert [type(layer) for layer in revert(model)] == [nn.BatchNorm1d, nn.BatchNorm2d]  # type: ignore[attr-defined]


def test_participating_does_nothing_where_nothing_is_synchronised() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    with participating([model], [0]):
        assert model(torch.randn(4, 3)).shape == (4, 3)


class Adapts(TTModel):
    """Normalises in predictions by the batch's own statistics, as in adaptation at test time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(2, CHANNELS), *(nn.BatchNorm1d(CHANNELS) for _ in range(2)), nn.Linear(CHANNELS, 1)]
        self.net = nn.Sequential(*layers).double()

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        loss: Tensor = (self.net(batch_data[0]) ** 2).mean()
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        self.net.train()
        predictions = self.net(batch_data[0])
        self.net.eval()
        return predictions[:, 0], None, {}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_layers_that_an_evaluation_puts_into_training_mode_see_one_batch(mode: str) -> None:
    """In fsdp, the layers of the Sequential are units, whose class is one of fully_shard."""
    x = torch.randn(24, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    predicted = []
    for options in ({}, {"gpu_mode": mode, "devices": 2, "timeout": 60}):
        model, batch_size = Adapts(), 4 if options else 8
        loop = cpu_loop(
            model,
            DataLoader(TensorDataset(x), batch_size),
            criterion=None,
            validation_loader=DataLoader(TensorDataset(x), 9),
            sync_batchnorm=True,
            **options,
        )
        loop.fit(num_epochs=1)
        predicted.append(loop.predict_with_model(DataLoader(TensorDataset(x), 9))[0])  # ranks have 2 batches and 1
    torch.testing.assert_close(predicted[1], predicted[0], rtol=0, atol=1e-10)
