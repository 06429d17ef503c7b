"""Both wrappers seen by the user: transparent, of torch's own classes, and clear in what they refuse."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit import small_loop
from kit.parallel_models import (
    CPU,
    Net,
    batch_of,
    furthest,
    gradients,
)
from kit.sharded_models import needs_fsdp_on_cpu
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from trainloop.errors import ConfigurationError
from trainloop.parallel import (
    TTDataParallel,
    TTDistributedDataParallel,
    TTFullyShardedDataParallel,
    reduce_gradients,
)
from trainloop.parallel.containers import with_dicts_of, without_dict_classes

# -- attributes of both wrappers ---------------------------------------------------------------------------------------


@pytest.fixture
def group(may_leave: Callable[..., None]) -> Iterator[None]:
    """A process group of this process alone."""
    may_leave("pipe:", "eventpoll", "socket:")  # Gloo's loop, for the life of the process
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # a wrapper and its reducer are a cycle, which holds the group
    dist.destroy_process_group()
    gc.collect()


class Rich(Net):
    """Has all kinds of attributes, and names that torch's wrappers use for themselves."""

    shared = "of the class"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.dim = 512
        self.logger = "my logger"
        self.device_ids = "my ids"
        self.static_graph = "my graph"
        self.process_group = "my group"
        self._hidden = "hidden"
        self._temperature = 1.0

    @property
    def temperature(self) -> float:
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if value <= 0:
            raise ValueError(f"temperature={value}")
        self._temperature = value

    @property
    def constant(self) -> int:
        return 7

    @property
    def broken(self) -> int:
        return self.missing_part.size  # type: ignore[no-any-return]

    def count(self) -> int:
        self.calls += 1
        return self.calls

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    def scatter(self, x: int) -> str:
        return f"scattered {x}"

    def gather(self) -> str:
        return "gathered"

    def __deepcopy__(self, memo: Any) -> Any:
        duplicate = type(self)()
        duplicate.load_state_dict(self.state_dict())
        duplicate.dim = self.dim
        return duplicate


def wrapped_ddp(module: nn.Module) -> TTDistributedDataParallel:
    return TTDistributedDataParallel(module, find_unused_parameters=True)


def wrapped_dp(module: nn.Module) -> TTDataParallel:
    return TTDataParallel(module, devices=2)


both = pytest.mark.parametrize("wrap", [wrapped_ddp, wrapped_dp])


@both
def test_a_wrapper_is_torchs_own_kind(wrap: Callable[..., Any], group: None) -> None:
    assert isinstance(wrapped_ddp(Net()), DistributedDataParallel)
    assert isinstance(wrapped_dp(Net()), nn.DataParallel)
    model = Net()
    wrapper = wrap(model)
    assert wrapper.module is model
    assert list(wrapper.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    assert list(wrapper.parameters()) == list(model.parameters())
    assert wrapper.eval() is wrapper
    assert not model.training
    assert wrapper.train().training
    assert model.training


@both
def test_attributes_are_read(wrap: Callable[..., Any], group: None) -> None:
    model = Rich()
    wrapper = wrap(model)
    for name in ("shared", "dim", "logger", "device_ids", "static_graph", "process_group", "_hidden", "temperature"):
        assert getattr(wrapper, name) == getattr(model, name), name
    assert (wrapper.constant, wrapper.twice(4)) == (7, 8)
    assert (wrapper.scatter(1), wrapper.gather()) == ("scattered 1", "gathered")
    assert wrapper.head is model.head
    assert wrapper.scale is model.scale
    assert wrapper.seen is model.seen
    assert wrapper.device == CPU
    assert (wrapper.count(), wrapper.count(), model.calls) == (1, 2, 2)
    assert {"temperature", "head", "get_loss", "state_dict"} <= set(dir(wrapper))


@both
def test_attributes_are_written_and_deleted(wrap: Callable[..., Any], group: None) -> None:
    model = Rich()
    wrapper = wrap(model)
    for name in ("dim", "logger", "device_ids", "static_graph", "process_group", "_hidden", "shared", "calls", "fresh"):
        setattr(wrapper, name, f"new {name}")
        assert vars(model)[name] == getattr(wrapper, name) == f"new {name}"
    wrapper.temperature = 2.5
    assert model._temperature == 2.5
    with pytest.raises(ValueError, match="temperature=-1"):
        wrapper.temperature = -1
    wrapper.head = nn.Linear(6, 3, bias=False)
    assert model.head.bias is None
    assert "module.head.weight" in wrapper.state_dict()
    wrapper.scale = nn.Parameter(torch.zeros(3))
    assert model.scale.tolist() == [0, 0, 0]
    assert wrapper.scale is model.scale
    wrapper.seen = torch.ones(1)
    assert float(model.seen) == 1
    wrapper._private = 1  # of the wrapper, as torch's own private names are
    assert not hasattr(model, "_private")
    del wrapper.fresh, wrapper._private, wrapper.dim, wrapper._hidden
    assert not any(hasattr(model, name) for name in ("fresh", "dim", "_hidden"))
    with pytest.raises(AttributeError, match="fresh"):
        del wrapper.fresh


@both
def test_a_missing_attribute_is_the_models(wrap: Callable[..., Any], group: None) -> None:
    wrapper = wrap(Rich())
    assert not hasattr(wrapper, "nothing")
    with pytest.raises(AttributeError, match="'Rich' object has no attribute 'nothing'"):
        _ = wrapper.nothing
    for broken in (wrapper, wrapper.module):  # nn.Module hides the attribute that its property misses
        with pytest.raises(AttributeError, match="'Rich' object has no attribute 'broken'"):
            _ = broken.broken
    assert not hasattr(wrap(nn.Linear(2, 2)), "get_loss")


@both
def test_torch_sees_its_own_attributes_where_the_model_has_them_too(wrap: Callable[..., Any], group: None) -> None:
    """All of a step, with a model whose ``logger``, ``device_ids`` and so on are strings."""
    model = Rich()
    wrapper = wrap(model)
    for seed in range(3):
        wrapper.get_loss(batch_of(seed), nn.CrossEntropyLoss(), CPU).backward()
        wrapper(batch_of(seed)[0]).sum().backward()
    reference = Rich()
    for seed in range(3):
        reference.get_loss(batch_of(seed), nn.CrossEntropyLoss(), CPU).backward()
        reference(batch_of(seed)[0]).sum().backward()
    assert furthest(gradients(model), gradients(reference)) < 1e-5


def test_a_wrapper_of_a_wrapper_reaches_the_model(group: None) -> None:
    model = Net()
    model.device_ids = "of the model"
    outer = TTDataParallel(TTDistributedDataParallel(model), devices=1)
    assert outer.device_ids == "of the model"
    outer.calls = 3
    assert model.calls == 3
    del outer.calls
    assert not hasattr(model, "calls")


def test_what_the_model_lacks_is_torchs(group: None) -> None:
    ddp = TTDistributedDataParallel(nn.Linear(2, 2), gradient_as_bucket_view=True)
    assert (ddp.device, ddp.dim, ddp.gradient_as_bucket_view, ddp.device_ids) == (CPU, 0, True, None)
    assert ddp.reducer is vars(ddp)["reducer"]
    ddp.find_unused_parameters = True
    assert not hasattr(ddp.module, "find_unused_parameters")
    assert ddp.find_unused_parameters
    dp = TTDataParallel(nn.Linear(2, 2), devices=2, dim=1)
    assert (dp.dim, dp.device_ids) == (1, [])
    with pytest.raises(AttributeError, match="logger"):
        _ = dp.logger


@both
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))])
def test_a_copy_works_and_stands_alone(wrap: Callable[..., Any], duplicate: Callable[[Any], Any], group: None) -> None:
    wrapper = wrap(Rich())
    wrapper.dim = 3
    duplicated = duplicate(wrapper)
    assert type(duplicated) is type(wrapper)
    assert type(duplicated.module) is Rich
    assert duplicated.dim == 3
    assert duplicated.logger == "my logger"
    duplicated.dim = 4
    assert wrapper.dim == 3
    assert duplicated.module.dim == 4
    duplicated.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).backward()
    assert wrapper.head.weight.grad is None
    assert duplicated.head.weight.grad is not None


@both
def test_a_method_given_anew_is_the_one_that_runs(wrap: Callable[..., Any], group: None) -> None:
    wrapper = wrap(Net())
    wrapper.get_loss = lambda batch, criterion, device: wrapper.module.scale.sum()
    assert wrapper.get_loss(batch_of(0), None, CPU).item() == 3.0


@both
def test_compiled_modules_work(wrap: Callable[..., Any], group: None) -> None:
    model, reference = Net(), Net()
    model.compile(backend="eager")
    wrapper = wrap(model)
    loss = wrapper.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU)
    loss.backward()
    expected = reference.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert furthest(gradients(model), gradients(reference)) < 1e-6
    compiled = torch.compile(Rich(), backend="eager")
    if wrap is wrapped_dp:  # torch's replicas of it end in a RecursionError
        with pytest.raises(ConfigurationError, match=r"the result of torch.compile.* in place, model.compile\(\)"):
            wrap(compiled)
        return
    optimised = wrap(compiled)
    assert (optimised.dim, optimised.temperature) == (512, 1.0)
    optimised.temperature = 2.0
    assert optimised.module._orig_mod._temperature == 2.0


@both
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it leaves out
def test_a_compiled_wrapper_computes_what_the_module_computes(wrap: Callable[..., Any], group: None) -> None:
    model, reference, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(8, 3)
    model.load_state_dict(reference.state_dict())
    compiled = torch.compile(wrap(model), backend="eager")  # kept: DDP's backward needs the wrapper
    out = compiled(x)
    out.sum().backward()
    reference(x).sum().backward()
    torch.testing.assert_close((out, model.weight.grad), (reference(x), reference.weight.grad))


# -- DDP: what it refuses ----------------------------------------------------------------------------------------------


def test_ddp_refuses_a_module_without_values(group: None) -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=r"weight is on the meta device and has no values\..*to_empty"):
        TTDistributedDataParallel(module)


def test_ddp_refuses_a_lazy_module(group: None) -> None:
    with pytest.raises(ConfigurationError, match=r"ModuleDict has lazy tensors .*: fc.weight, fc.bias.*Run one"):
        TTDistributedDataParallel(nn.ModuleDict({"fc": nn.LazyLinear(3)}))
    with pytest.raises(ConfigurationError, match=r"TTDataParallel: LazyLinear has lazy tensors .*: weight, bias"):
        TTDataParallel(nn.LazyLinear(3), devices=2)


def test_the_number_of_replicas_may_be_a_number_of_numpy() -> None:
    replicas = TTDataParallel(nn.Linear(2, 2), devices=np.int64(2))  # type: ignore[arg-type]
    assert replicas(torch.ones(4, 2)).shape == (4, 2)


def test_ddp_refuses_a_module_with_nothing_to_train(group: None) -> None:
    with pytest.raises(RuntimeError, match=r"no parameter of Linear requires a gradient.*Unfreeze a parameter"):
        TTDistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def test_ddp_refuses_a_parameter_that_was_frozen_when_it_was_wrapped(group: None) -> None:
    """Torch's DDP has no hook for it: each rank would train it with its own gradients, without a word."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].bias.requires_grad_(False)
    wrapper = TTDistributedDataParallel(net)
    wrapper(torch.ones(3, 2)).sum().backward()
    net[0].bias.requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"^0\.bias: frozen when .* wrapped the model, but requires gradients"):
        wrapper(torch.ones(3, 2))
    with torch.no_grad():
        wrapper(torch.ones(3, 2))  # an evaluation averages nothing
    copy.deepcopy(wrapper)(torch.ones(3, 2)).sum().backward()  # a copy has hooks of its own


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net[1], "weight", nn.Parameter(torch.ones(1, 2))),
        lambda net: net.append(nn.Linear(1, 1)),
        lambda net: net.register_parameter("scale", nn.Parameter(torch.ones(1))),
    ],
    ids=["replaced", "a module", "a parameter"],
)
def test_ddp_refuses_a_parameter_that_was_added_after_it_was_wrapped(change: Any, unused: bool, group: None) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    wrapper = TTDistributedDataParallel(net, find_unused_parameters=unused)
    nn.Linear(3, 3)  # another module's parameters are its own affair
    wrapper(torch.ones(3, 2)).sum().backward()
    change(net)
    with torch.no_grad():
        wrapper(torch.ones(3, 2))
    with pytest.raises(ConfigurationError, match="added to the model after TTDistributedDataParallel wrapped it"):
        wrapper(torch.ones(3, 2))
    again = TTDistributedDataParallel(net, find_unused_parameters=True)
    again(torch.ones(3, 2)).sum().backward()


def test_ddp_refuses_a_parameter_that_was_added_frozen_and_trains_later(group: None) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    wrapper = TTDistributedDataParallel(net)
    net.register_parameter("scale", nn.Parameter(torch.ones(1), requires_grad=False))
    wrapper(torch.ones(3, 2)).sum().backward()
    net.scale.requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"^scale: frozen when"):
        wrapper(torch.ones(3, 2))


def test_ddp_refuses_to_work_without_a_group() -> None:
    with pytest.raises(
        ConfigurationError, match=r"there is no process group\. Call torch.distributed.init_process_gro"
    ):
        TTDistributedDataParallel(Net())


def test_torch_has_what_the_wrapper_builds_on() -> None:
    """``_run_method`` stands for the body of forward: this fails where a torch makes it differently."""
    body = inspect.getsource(DistributedDataParallel.forward)
    for step in ("self._pre_forward(", "self._run_ddp_forward(", "self._post_forward("):
        assert body.count(step) == 1, step
    run = inspect.getsource(DistributedDataParallel._run_ddp_forward)
    assert "with self._inside_ddp_forward():" in run
    replicate = inspect.getsource(nn.parallel.replicate)
    assert "_replicate_for_data_parallel()" in replicate
    assert "_former_parameters" in replicate


def test_reduce_gradients_in_one_process_does_nothing() -> None:
    p = torch.ones(2, requires_grad=True)
    p.sum().backward()
    reduce_gradients([p])
    assert p.grad is not None
    assert p.grad.tolist() == [1, 1]


def test_evaluation_after_fit_has_the_wrapper_s_arguments_of_fit() -> None:
    sizes: list[int] = []

    class Sized(small_loop.Net):
        def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
            sizes.append(len(batch_data[0]))
            return super().get_predictions(batch_data, device)

    loop = small_loop.make_loop(Sized(), gpu_mode="dp", devices=2)
    loop.predict_on_validation_set()
    loop.fit(num_epochs=1, dp_model_args={"devices": 4})
    before, sizes[:] = sorted(sizes), []
    loop.predict_on_validation_set()
    assert before == [1, 8, 8, 8, 8]  # 33 samples in batches of 16, over two replicas
    assert sorted(sizes) == [1, *[4] * 8]
    loop.fit(num_epochs=1)
    sizes[:] = []
    loop.predict_on_validation_set()
    assert sorted(sizes) == before


def test_dicts_of_a_batch_that_torch_can_not_rebuild_keep_their_class() -> None:
    class Own(dict):  # type: ignore[type-arg]
        name = ""

    own, lists = Own(x=torch.ones(2)), defaultdict(list, {0: torch.ones(3)})
    own.name = "train"
    opened = without_dict_classes((own, [lists, 3], {"a": lists}))
    assert [type(opened[0]), type(opened[1][0]), type(opened[2]["a"])] == [dict] * 3
    opened[0]["x"] = torch.zeros(2, dtype=torch.bfloat16)  # as torch casts it
    back = with_dicts_of(opened, (own, [lists, 3], {"a": lists}))
    assert (type(back[0]), back[0].name, back[0]["x"].dtype) == (Own, "train", torch.bfloat16)
    assert back[1][0]["missing"] == []
    assert "missing" not in lists
    assert own["x"].dtype == torch.float32


# -- gradients of gradients under FSDP ---------------------------------------------------------------------------------


class Critic(Net):
    """The critic of a Wasserstein GAN: a penalty on the gradients of inputs, before or after other forward passes."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.parts = parts

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = torch.zeros(())
        for part in self.parts.split():
            x = batch_data.clone().requires_grad_(part != "plain")
            if part == "penalty":
                (g,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
                loss = loss + (g.norm(dim=1) - 1).square().mean()
            elif part == "adversarial":
                (g,) = torch.autograd.grad(self.critic(x).sum(), x)
                loss = loss + self.critic(batch_data + g).mean()
            elif part == "own weights":
                weights = {name: 0.5 * p for name, p in self.critic.named_parameters()}
                loss = loss + torch.func.functional_call(self.critic, weights, (x,)).mean()
            else:
                loss = loss + self.critic(x).mean()
        return {"loss": (loss, 1)}


@needs_fsdp_on_cpu
@pytest.mark.parametrize(
    "parts",
    ["penalty", "penalty plain", "plain penalty", "penalty adversarial", "inputs plain", "own weights"],
)
def test_no_gradient_is_lost_under_fsdp(group: None, parts: str) -> None:
    sharded, plain, x = Critic(parts), Critic(parts), torch.randn(5, 4)
    wrapper = TTFullyShardedDataParallel(sharded, shard=[] if parts == "own weights" else None)
    for _ in range(2):
        for model in (wrapper, plain):
            model.get_loss(x, None, CPU)["loss"][0].backward()
    for (name, p), own in zip(plain.critic.named_parameters(), sharded.critic.parameters(), strict=True):
        found = None if own.grad is None else own.grad.full_tensor()  # type: ignore[attr-defined]
        assert (found is None) == (p.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(found, p.grad, msg=name)


def test_weights_that_pruning_computes_are_the_modules_own_in_dp() -> None:
    """The next stage of pruning reads them."""

    def trained(mode: str) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        model: nn.Module = net if mode == "single" else TTDataParallel(net, devices=2)
        x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
        for stage in range(2):
            prune.l1_unstructured(net[0], "weight", amount=0.3)
            sgd = torch.optim.SGD(net.parameters(), lr=0.5)
            for _ in range(3 + stage):
                sgd.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                sgd.step()
        return net

    single, parallel = trained("single"), trained("dp")
    assert torch.equal(single[0].weight_mask, parallel[0].weight_mask)  # type: ignore[index]
    assert torch.allclose(single[0].weight, parallel[0].weight, rtol=1e-12, atol=1e-12)  # type: ignore[index]
