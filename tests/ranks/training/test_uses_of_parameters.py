"""get_loss uses parameters, gradients and exchanges in other ways than one forward: equal numbers, or an error."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TTBasicModel, TTModel
from trainloop.distributed import all_gather, all_reduce
from trainloop.errors import ConfigurationError, WorkerFailedError
from trainloop.parallel import TTDataParallel
from trainloop.parallel.sharded.misuse import explain_sharded

D = torch.float64
NAMES = {
    "functional_call": "functional_call can't replace",
    "functional_call of weights in vmap": "functional_call can't replace",
    "inner loop": "a gradient is requested for a.0.weight, of which this rank has a shard",
    "penalty, then a forward": "gradient penalty",
    "no forward": "a parameter was used outside of the forward of its block",
    "a library's search": "a parameter was used outside of the forward of its block",
    "a sum in place": "a parameter was used outside of the forward of its block",
}
OWN_BACKWARD = "get_loss changes the gradients of parameters"


class Net(TTBasicModel):
    def __init__(self, use: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.calls = 0
        self.a, self.b = (nn.Sequential(nn.Linear(k, 8, dtype=D), nn.Tanh()) for k in (3, 8))
        self.c = nn.Linear(8, 1, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        with torch.enable_grad():  # in an evaluation as well
            return self.loss(*batch_data)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mse, parameters = nn.functional.mse_loss, dict(self.named_parameters())
        if self.use == "functional_call":
            return mse(functional_call(self, {n: 0.5 * p for n, p in parameters.items()}, (x,)), y)
        if self.use == "functional_call of weights in vmap":
            stacked = torch.stack([self.a[0].weight, 0.5 * self.a[0].weight])
            out = vmap(lambda weight: functional_call(self.a, {"0.weight": weight}, (x,)))(stacked)
            return mse(self.c(self.b(out.sum(0))), y)
        if self.use == "jacobians of samples":
            return mse(self(x), y) + vmap(jacrev(self))(x).square().mean()
        if self.use == "inner loop":
            losses = []
            for one, target in zip(x, y, strict=True):
                inner = mse(functional_call(self, parameters, (one,)), target)
                found = torch.autograd.grad(inner, tuple(parameters.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), found, strict=True)}
                losses.append(mse(functional_call(self, fast, (one,)), target))
            return torch.stack(losses).mean()
        leaf = x.clone().requires_grad_()
        if self.use.startswith("penalty"):
            out = self(leaf)
            (g,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
            return mse(self(x) if "forward" in self.use else out, y) + g.square().sum(1).mean()
        if self.use == "no forward":
            return torch.stack([p.square().sum() for p in self.parameters()]).sum()
        if self.use == "a sum in place":  # an assertion of torch, without a text
            total = torch.zeros(1, dtype=D)
            for p in self.parameters():
                total += p.square().sum()
            return total.sum()
        if self.use == "a library's search":
            return torch.stack([p.square().sum() for part in self.modules() for p in found_by_torchdiffeq(part)]).sum()
        if self.use == "adversarial":
            (g,) = torch.autograd.grad(self(leaf).sum(), leaf)
            return mse(self(x + 0.1 * g.sign()), y)
        if self.use == "several forwards":
            return (mse(self(x), y) + mse(self(2 * x), y)) / 2
        if self.use == "sampling":
            with torch.no_grad():
                for _ in range(3):
                    x = x + self(x)
            return mse(self(x), y)
        self.calls += 1
        if self.use == "own backward in a later step" and self.calls < 3:
            return mse(self(x), y)
        if self.use.startswith("own backward"):
            hidden = self.b(self.a(x))
            own = hidden.detach().requires_grad_()
            loss = mse(self.c(own), y)
            loss.backward()
            assert own.grad is not None
            return (hidden * own.grad).sum() if torch.is_grad_enabled() and self.training else loss.detach()
        if self.use == "backward in evaluation":
            if not self.training:
                mse(self(x), y).backward()
            return mse(self(x), y)
        raise AssertionError(self.use)


def found_by_torchdiffeq(module: nn.Module) -> list[Tensor]:
    """Return a module's own parameters as torchdiffeq finds them for its adjoint method."""
    if getattr(module, "_is_replica", False):
        return [value for value in vars(module).values() if isinstance(value, Tensor) and value.requires_grad]
    return list(module.parameters(recurse=False))


def trained(model: Any, mode: str, **kwargs: Any) -> tuple[Tensor, list[float]]:
    rows = kwargs.pop("rows", 22)
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=D)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    size = 6 if mode in ("single", "dp") else 3
    optimizer = kwargs.pop("optimizer", None) or optim.SGD(model.parameters(), lr=0.1)
    loop = cpu_loop(
        model,
        DataLoader(data, size),
        optimizer,
        nn.MSELoss(),
        validation_loader=DataLoader(data, 5),
        gpu_mode=mode,
        devices=2,
        timeout=60,
    )
    units = kwargs.pop("units", [nn.Sequential])
    if mode == "fsdp":
        kwargs["fsdp_model_args"] = {"shard": units}
    loop.fit(2, **kwargs)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), loop.history["val_loss"]


USES = [
    "functional_call",
    "functional_call of weights in vmap",
    "jacobians of samples",
    "inner loop",
    "penalty",
    "penalty, then a forward",
    "no forward",
    "a library's search",
    "a sum in place",
    "adversarial",
    "several forwards",
    "sampling",
    "own backward",
    "own backward in a later step",
    "backward in evaluation",
]
LONG = {*USES} - NAMES.keys()
QUICK = {
    *((use, "dp") for use in USES),
    *((use, "fsdp") for use in ("functional_call of weights in vmap", "jacobians of samples", "no forward")),
}


@pytest.mark.filterwarnings("ignore:Grad strides do not match", "ignore:Found a non-scalar tensor")
@pytest.mark.parametrize(
    "use, mode",
    [
        pytest.param(use, mode, marks=pytest.mark.long if use in LONG or (use, mode) not in QUICK else ())
        for mode in ("dp", "fsdp", "ddp")
        for use in USES
    ],
)
def test_equal_numbers_or_an_error(use: str, mode: str) -> None:
    if use.startswith("own backward"):
        with pytest.raises((ConfigurationError, WorkerFailedError), match=OWN_BACKWARD):
            trained(Net(use), mode)
        return
    if mode == "fsdp" and use in NAMES:
        with pytest.raises(WorkerFailedError, match=NAMES[use]):
            trained(Net(use), mode)
        return
    (ours, losses), (theirs, their_losses) = trained(Net(use), mode), trained(Net(use), "single")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert losses == pytest.approx(their_losses, abs=1e-12)


@pytest.mark.parametrize(
    "text", ["setStorage: ... storage of size 0", "a non-zero number of elements, but its data is not allocated yet"]
)
def test_each_text_of_torch_for_freed_parameters_is_explained(text: str) -> None:
    with pytest.raises(ConfigurationError, match="gradient penalty"):
        explain_sharded(RuntimeError(text))


class Contrastive(Net):
    """The model of the guide: a loss over the rows of all ranks; it also counts them."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        keys = self.b(self.a(batch_data[0]))
        keys = self.all_gather(keys, concat=True)
        assert all_gather(keys).shape[0] == all_reduce(1, "sum")
        return nn.functional.cross_entropy(keys @ keys.T, torch.arange(len(keys))) + 0.0 * self.c(keys).sum()


class Whole(Contrastive):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        keys = self.b(self.a(batch_data[0]))
        return nn.functional.cross_entropy(keys @ keys.T, torch.arange(len(keys))) + 0.0 * self.c(keys).sum()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_an_evaluation_does_not_join_batches_of_several_ranks(mode: str) -> None:
    ours, losses = trained(Contrastive(), mode)  # 5 batches: ranks have unequal numbers
    theirs, their_losses = trained(Whole(), "single")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert losses == pytest.approx(their_losses, abs=1e-12)


def test_a_replica_can_not_exchange() -> None:
    with pytest.raises(ConfigurationError, match=r"all_gather\(concat=True\) in gpu_mode='dp'"):
        trained(Contrastive(), "dp")


class Queue(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.BatchNorm1d(3, dtype=D)
        self.register_buffer("center", torch.zeros(3, dtype=D))
        self.register_buffer("steps", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(3, dtype=D), requires_grad=False)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        if self.training:
            self.steps += 1  # the same on all replicas
            with torch.no_grad():
                if self.how == "in place":
                    self.center.mul_(0.9).add_(0.1 * x.mean(0))
                elif self.how == "replaced":
                    self.center = 0.9 * self.center + 0.1 * x.mean(0)
                elif self.how == "frozen":
                    self.frozen.lerp_(self.a[0].weight.mean(0), 0.1)  # type: ignore[operator,union-attr]
                elif self.how == "c.bias":  # initialized from the first batch, as in a normalizing flow
                    self.c.bias.copy_(x.mean(0)[:1])
        return criterion(self(self.norm(x)), y)


class Alternating(Queue):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield criterion(self(batch_data[0]), batch_data[1])
        yield super().get_loss(batch_data, criterion, device)


@pytest.mark.parametrize("how", ["in place", "c.bias", "not"])
def test_changes_between_the_losses_of_a_batch_are_refused_in_dp(how: str) -> None:
    if how == "not":
        (ours, _), (theirs, _) = trained(Alternating(how), "dp"), trained(Alternating(how), "dp")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        return
    name = "center" if how == "in place" else how
    with pytest.raises(ConfigurationError, match=f"gpu_mode='dp': get_loss changes {name}"):
        trained(Alternating(how), "dp")


class Sampled(Net):
    """Freezes its parameters while it draws samples, as energy-based models do."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.requires_grad_(False)
        x = batch_data[0].clone().requires_grad_()
        x = x - torch.autograd.grad(self(x).sum(), x)[0]
        self.requires_grad_(True)
        return self(batch_data[0]).mean() - self(x.detach()).mean()


def test_flags_that_get_loss_changes_are_explained_in_dp() -> None:
    with pytest.raises(ConfigurationError, match="get_loss changes requires_grad of a parameter"):
        trained(Sampled(), "dp")


class Cloned(Net):
    """Copies itself to take steps with the copy, as in meta-learning."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return copy.deepcopy(self)(batch_data[0]).mean()


def test_copies_of_a_replica_are_explained_in_dp() -> None:
    with pytest.raises(ConfigurationError, match=r"get_loss calls copy\.deepcopy"):
        trained(Cloned(), "dp")


@pytest.mark.parametrize("how", ["in place", "replaced", "frozen", "c.bias", "not"])
def test_buffers_that_get_loss_changes_are_refused_in_dp(how: str) -> None:
    model = Queue(how)
    if how == "not":
        trained(model, "dp")
        assert model.steps == 8
        return
    name = how if how in ("frozen", "c.bias") else "center"
    with pytest.raises(ConfigurationError, match=f"gpu_mode='dp': get_loss changes {name}"):
        trained(model, "dp")


def test_a_batch_that_replicas_can_not_share_is_explained() -> None:
    batch = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]), torch.ones(2)
    with pytest.raises(ConfigurationError, match="can't split a PackedSequence"):
        TTDataParallel(Net(), devices=2).get_loss(batch, None, torch.device("cpu"))


def test_replicas_may_change_their_parts_in_place() -> None:
    class Masks(Net):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            x[x < 0] = 0.0
            return nn.functional.mse_loss(self(x.mul_(2)), y)

    (ours, losses), (theirs, their_losses) = trained(Masks(), "dp"), trained(Masks(), "single")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert losses == pytest.approx(their_losses, abs=1e-12)


@pytest.mark.long
def test_a_model_called_by_a_callback_is_explained_in_fsdp() -> None:
    class Calls(AbstractCallback):
        def on_epoch_end(self) -> None:
            if right:
                y_pred, _, _ = self.train_loop_obj.predict_with_model([(torch.ones(2, 3, dtype=D), torch.ones(2))])
                assert y_pred.shape == (2, 1)
            else:
                self.train_loop_obj.model(torch.ones(2, 3, dtype=D))

    right = True
    trained(Net("several forwards"), "fsdp", callbacks=[Calls("calls")])
    right = False
    with pytest.raises(WorkerFailedError, match=r"outside of get_loss.*predict_with_model\(\[batch\]\)"):
        trained(Net("several forwards"), "fsdp", callbacks=[Calls("calls")])


@pytest.mark.long
def test_an_embedding_that_a_callback_calls_is_explained_in_fsdp() -> None:
    class Words(Net):
        """The lookup in a shard alone works; torch fails where the next layer uses its result."""

        def __init__(self) -> None:
            super().__init__("several forwards")
            self.words, self.reads = nn.Embedding(5, 3, dtype=D), nn.LSTM(3, 3, dtype=D)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(x + self.reads(self.words(torch.arange(len(x))))[0], y)

    class Writes(AbstractCallback):
        def on_epoch_end(self) -> None:
            model = self.train_loop_obj.model
            model.reads(model.words(torch.tensor([3, 1])))

    with pytest.raises(WorkerFailedError, match=r"outside of get_loss.*predict_with_model\(\[batch\]\)"):
        trained(Words(), "fsdp", callbacks=[Writes("writes")])


@pytest.mark.long
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_evaluation_end"])
def test_a_model_that_calls_itself_in_its_hook_is_explained_in_fsdp(hook: str) -> None:
    class Calls(Net):
        def on_epoch_begin(self) -> None:
            if hook == "on_epoch_begin":
                self(torch.ones(2, 3, dtype=D))

        def on_evaluation_end(self) -> None:  # without the argument that the loop passes
            if hook == "on_evaluation_end":
                self(torch.ones(2, 3, dtype=D))

    with pytest.raises(WorkerFailedError, match=rf"{hook} uses a parameter .* outside of get_loss"):
        trained(Calls("several forwards"), "fsdp")


@pytest.mark.long
def test_a_submodule_may_run_in_a_callback_before_the_first_step_in_fsdp() -> None:
    class Plays(AbstractCallback):
        """Plays an episode with a part of the model before each epoch."""

        def on_epoch_begin(self) -> None:
            with torch.no_grad():
                self.played.append(self.train_loop_obj.model.a(torch.ones(1, 3, dtype=D)).sum().item())

        def __init__(self) -> None:
            super().__init__("plays")
            self.played: list[float] = []

    one, other = Plays(), Plays()
    ours, losses = trained(Net("several forwards"), "fsdp", callbacks=[one])
    theirs, their_losses = trained(Net("several forwards"), "single", callbacks=[other])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert losses == pytest.approx(their_losses, abs=1e-12)
    assert one.played == pytest.approx(other.played, abs=1e-12)
    assert len(one.played) == 2


class Painted(TTModel):
    """Its parameter is what it predicts, as in style transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.ones(4, 2, dtype=D))

    def forward(self) -> Tensor:
        return self.image

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(self().sum(1, keepdim=True), batch_data[1])

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(), batch_data[1], {"rows": list(self.image), "columns": self.image.T.contiguous().T}


@pytest.mark.long
def test_predictions_may_be_parameters_in_fsdp() -> None:
    """The memory of gathered parameters is freed after the pass, and reading it would be a crash."""
    found = {}
    for mode in ("single", "fsdp"):
        model = Painted()
        batches = [(torch.ones(4, 3, dtype=D), torch.full((4, 1), float(i), dtype=D)) for i in range(4)]
        loop = cpu_loop(
            model, batches, criterion=nn.MSELoss(), validation_loader=batches[:2], gpu_mode=mode, devices=2, timeout=60
        )
        loop.fit(1, grad_accumulation=2 if mode == "single" else 1)
        y_pred, _, metadata = loop.predict_on_validation_set()
        assert torch.equal(y_pred, torch.stack(metadata["rows"]))
        assert torch.equal(y_pred, metadata["columns"])
        found[mode] = y_pred
    torch.testing.assert_close(found["fsdp"], found["single"], rtol=0, atol=1e-12)


class Field(Net):
    """Predicts a gradient by its inputs, as a Hamiltonian network; in evaluations without a graph of it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (field,) = torch.autograd.grad(self.c(self.b(self.a(x))).sum(), x, create_graph=self.training)
        return field.sum(1, keepdim=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(x), y)


@pytest.mark.long
def test_gradients_by_inputs_in_evaluations_leave_no_gathered_parameters_in_fsdp() -> None:
    """These would be stale after the next step."""

    class Validates(AbstractCallback):
        def on_after_optimizer_step(self) -> None:
            self.losses.append(self.train_loop_obj.evaluate_loss_on_validation_set())

        def __init__(self) -> None:
            super().__init__("validates")
            self.losses: list[float] = []

    one, other = Validates(), Validates()
    ours, losses = trained(Field(), "fsdp", callbacks=[one])
    theirs, their_losses = trained(Field(), "single", callbacks=[other])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert losses == pytest.approx(their_losses, abs=1e-12)
    assert one.losses == pytest.approx(other.losses, abs=1e-12)


class Forces(Net):
    """Energies and their gradients by the positions: two losses, each with its own backward through the same graph."""

    def loss(self, x: Tensor, y: Tensor) -> Any:
        x = x.detach().requires_grad_()
        energy = self(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return MultiLoss({"energy": nn.functional.mse_loss(energy, y), "forces": (forces.square().mean(), x.numel())})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("units", [[], [nn.Sequential]], ids=["one unit", "units"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_several_losses_of_gradients_by_inputs(optimizers: int, units: list[Any]) -> None:
    """The second backward needs gathered parameters that the first one would free."""
    found = {}
    for mode in ("single", "fsdp"):
        model = Forces()
        parts = {"energy": [*model.a.parameters(), *model.c.parameters()], "forces": model.b.parameters()}
        both = MultiOptimizer({name: optim.SGD(part, lr=0.1) for name, part in parts.items()})
        optimizer = both if optimizers == 2 else None
        # With 19 rows, a rank is without the last batch.
        found[mode], _ = trained(model, mode, optimizer=optimizer, units=units, rows=19)
    torch.testing.assert_close(found["fsdp"], found["single"], rtol=0, atol=1e-12)


class Keeps(Net):
    """Keeps a view of a weight for a callback."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self(x), y)
        self.last = self.c.weight.detach().clone() if self.use == "clone" else self.c.weight.detach()
        return loss


@pytest.mark.long
def test_a_kept_view_of_a_gathered_parameter_warns_in_fsdp() -> None:
    """Its memory is freed: a callback would read other numbers, or crash. (Here, warnings are errors.)"""
    with pytest.raises(WorkerFailedError, match=r"the attribute last of Keeps shares the memory of c\.weight.*\.clone"):
        trained(Keeps(), "fsdp")
    trained(Keeps("clone"), "fsdp")


class Boxed(nn.Module):
    def __init__(self, kind: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(inputs, outputs, dtype=D)

    def forward(self, x: Any) -> Any:
        return self.kind(value=self.layer(x.value if isinstance(x, self.kind) else x).tanh())


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclass
class DataBox:
    value: Tensor


class Boxes(Net):
    """Its blocks return objects."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a, self.b = Boxed(kind, 3, 8), Boxed(kind, 8, 8)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.c(self.b(self.a(x)).value), y)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_outputs_of_blocks_in_fsdp_are_objects_in_which_torch_finds_tensors() -> None:
    single, sharded = (trained(Boxes(DataBox), mode, units=[Boxed])[0] for mode in ("single", "fsdp"))
    torch.testing.assert_close(sharded, single, rtol=0, atol=1e-12)
    with pytest.raises(WorkerFailedError, match=r"returns in an object .* a dict or a dataclass"):
        trained(Boxes(Box), "fsdp", units=[Boxed])


class Apart(TTModel):
    """Its ranks' weights become different: an embedding changes its own, or two recomputations hide them from DDP."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words = nn.Embedding(40, 4, max_norm=0.1 if how == "max_norm" else None)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x = self.words(batch_data[0])
        if self.how == "max_norm":
            return self.head(self.layer(x)).square().mean()
        first, second = (checkpoint(self.layer, x * k, use_reentrant=True) for k in (1, 2))
        return self.head(first).square().mean() + second.square().mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        raise NotImplementedError


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    "how, cause",
    [
        ("max_norm", r"the ranks' weights differ: words\.weight .* An embedding with max_norm changes its weight"),
        ("checkpoint", r"(weights differ: layer\.weight|ready only once).* use_reentrant=False"),  # torch's, before 2.7
    ],
)
def test_weights_that_differ_for_a_known_cause(how: str, cause: str) -> None:
    model = Apart(how)
    loader = DataLoader(TensorDataset(torch.arange(40)), 4)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    loop = cpu_loop(model, loader, sgd, None, gpu_mode="ddp", devices=2)
    with pytest.raises(WorkerFailedError, match=f"(?s){cause}"):
        loop.fit(1)
