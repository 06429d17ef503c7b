"""``compile='step'``: the numbers of a loop by hand, whatever a graph can't hold, and the line that says so."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import reference
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, MultiOptimizer, TrainLoop, TTModel
from trainloop.callbacks import LearningRateMonitor, LRScheduler, ModelCheckpoint, TensorBoard
from trainloop.errors import ConfigurationError
from trainloop.train_loop.training.whole_step import WholeStepTraining

pytestmark = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.13"), reason="this torch can't trace a backward pass into a graph"
)
CRITERION = nn.CrossEntropyLoss()


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        y_pred = self(x)
        self.log("accuracy", (y_pred.argmax(1) == y).double().mean())
        return criterion(y_pred, y) * self.factor

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data[0]).argmax(1), batch_data[1], {}


class Looks(Net):
    """Python that no graph can hold: it reads a number of each step."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        return loss if loss.item() < 1e9 else 2 * loss


class Counts(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("counts")
        self.began = self.ended = 0

    def on_batch_begin(self) -> None:
        self.began += 1

    def on_batch_end(self) -> None:
        self.ended += 1


class Doubles(AbstractCallback):
    """The loss is another one in the second epoch."""

    def on_epoch_end(self) -> None:
        self.train_loop_obj.model.factor *= 2


class Scales(AbstractCallback):
    def on_after_gradient_update(self, optimizer_idx: int) -> None:
        pass


def loader() -> DataLoader[Any]:
    x, y = make_data().tensors
    return DataLoader(TensorDataset(x.double(), y), 16)


def loss_of(model: Any, batch: Any) -> Tensor:
    return CRITERION(model(batch[0]), batch[1])


def by_hand(optimizer_of: Any, *, norm: float | None = None, doubles: bool = False, lr: float = 1.0) -> list[Tensor]:
    model = Net().double()
    optimizer = optimizer_of(model.parameters())
    for factor in (1.0, 2.0 if doubles else 1.0):
        scaled = partial(lambda factor, *batch: loss_of(*batch) * factor, factor)
        reference.train_accumulated(model, loader(), optimizer, scaled, 1, accumulation=1, max_norm=norm)
        for group in optimizer.param_groups:
            group["lr"] *= lr
    return [t.detach() for t in model.state_dict().values()]


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01)


def make_loop(model: Any = None, optimizer_of: Callable[[Any], Any] = sgd, **options: Any) -> TrainLoop:
    model = Net() if model is None else model
    model.to(options.pop("dtype", torch.double))
    return TrainLoop(
        model,
        loader(),
        loader(),
        optimizer=optimizer_of(model.parameters()),
        criterion=CRITERION,
        **{"accelerator": "cpu", "progress_bar": False, "compile": "step", **options},
    )


def check(loop: TrainLoop, expected: list[Tensor]) -> None:
    # In a graph torch's Adam corrects its bias in the precision of its counter, float32.
    atol = 1e-5 if isinstance(loop.optimizer, optim.AdamW) else 1e-9
    torch.testing.assert_close(list(loop.model.state_dict().values()), expected, rtol=0, atol=atol)
    assert all(p.grad is None for p in loop.model.parameters())
    assert len(loop.history["val_loss"]) == 2
    assert len(loop.history.steps("accuracy")) == 14


@pytest.fixture(autouse=True)
def quick_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the C++ compiler, which takes long."""
    torch._dynamo.reset()
    if "inductor" not in request.node.name:
        monkeypatch.setattr(WholeStepTraining, "backend", "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("optimizer_of, norm", [(sgd, None), (adam, 0.5)])
def test_weights_and_logs_are_those_of_a_loop_by_hand(optimizer_of: Any, norm: float | None) -> None:
    """The last batch of each epoch is shorter; a second fit goes on; what get_loss reads may change."""
    counts = Counts()
    loop = make_loop(optimizer_of=optimizer_of, gradient_clip_norm=norm)
    with warnings_are_errors():
        loop.fit(num_epochs=1, callbacks=[counts])
        loop.model.factor = 2.0
        loop.fit(num_epochs=1)
    check(loop, by_hand(optimizer_of, norm=norm, doubles=True))
    assert (counts.began, counts.ended) == (7, 7)
    plain = make_loop(optimizer_of=optimizer_of, gradient_clip_norm=norm, compile=False)
    plain.fit(num_epochs=2)
    assert (loop.total_iteration_idx, loop.global_step) == (plain.total_iteration_idx, plain.global_step)
    assert loop.history.steps("accuracy")[:7] == plain.history.steps("accuracy")[:7]


class Padded(Net):
    """Some targets of each batch are ignored; the loss is that of a criterion or of a function."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        y = torch.where(x[:, 0] > 0, y, -100)
        return nn.functional.cross_entropy(self(x), y) if self.factor == 2.0 else criterion(self(x), y)


@pytest.mark.long
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_mean_loss_is_over_the_targets_that_are_not_ignored(factor: float) -> None:
    losses = []
    for compile in ("step", False):
        model = Padded()
        model.factor = factor
        loop = make_loop(model=model, compile=compile)
        loop.fit(num_epochs=2)
        losses.append(loop.history["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


class Skips(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss(batch_data, criterion, device), self.weight


@pytest.mark.parametrize("weight", [0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_batch_whose_loss_weighs_nothing_changes_no_weights(weight: Any) -> None:
    model = Skips()
    model.weight = weight
    before = [p.detach().clone() for p in model.parameters()]
    make_loop(model=model).fit(num_epochs=1)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.long
def test_logs_go_on_after_an_evaluation() -> None:
    loop = make_loop()
    loop.fit(num_epochs=2, callbacks=[Doubles("doubles")])
    check(loop, by_hand(sgd, doubles=True))


class Saliency(AbstractCallback):
    """Computes gradients of its own after each step, and clears them."""

    def on_batch_end(self) -> None:
        model = self.train_loop_obj.model
        inputs = torch.ones(4, 8, dtype=torch.double, requires_grad=True)
        model.eval()
        model(inputs).sum().backward()
        model.train()
        model.zero_grad()


@pytest.mark.long
def test_a_hook_may_clear_gradients() -> None:
    loop = make_loop()
    with warnings_are_errors():
        loop.fit(num_epochs=2, callbacks=[Saliency("saliency")])
    check(loop, by_hand(sgd))


@pytest.mark.slow
def test_with_inductor_too() -> None:
    loop = make_loop(optimizer_of=adam, gradient_clip_norm=0.5)
    with warnings_are_errors():
        loop.fit(num_epochs=2, callbacks=[Doubles("doubles")])
    check(loop, by_hand(adam, norm=0.5, doubles=True))


@pytest.mark.parametrize(
    "model, callbacks, reason",
    [
        pytest.param(Looks, [], r"data-dependent.*test_whole_step\.py\", line \d+, in get_loss", id="a number is read"),
        pytest.param(Net, [Scales("scales")], "on_after_gradient_update of scales ", id="a callback in between"),
    ],
)
def test_what_is_no_graph_is_done_without(model: type[Net], callbacks: list[Any], reason: str) -> None:
    counts = Counts()
    loop = make_loop(model())
    with pytest.warns(
        UserWarning, match=rf"compile='step': steps are not compiled from here on\. The reason: .*{reason}"
    ) as told:
        loop.fit(num_epochs=2, callbacks=[*callbacks, counts])
    assert len([one for one in told if "compile=" in str(one.message)]) == 1
    check(loop, by_hand(sgd))
    assert (counts.began, counts.ended, loop.total_iteration_idx) == (14, 14, 13)


def test_a_fused_optimizer_is_done_without() -> None:
    loop = make_loop(optimizer_of=lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True))
    with pytest.warns(UserWarning, match="fused=True out of graphs"):
        loop.fit(num_epochs=2)
    check(loop, by_hand(sgd))


def test_accumulation_is_done_without() -> None:
    loop, plain = make_loop(), make_loop(compile=False)
    with pytest.warns(UserWarning, match="several micro-batches"):
        loop.fit(num_epochs=1, grad_accumulation=2)
    plain.fit(num_epochs=1, grad_accumulation=2)
    torch.testing.assert_close(loop.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)


class Halves(AbstractCallback):
    def on_epoch_end(self) -> None:
        self.train_loop_obj.optimizer.param_groups[0]["lr"] *= 0.5


class HalvesInABatch(AbstractCallback):
    def on_batch_begin(self) -> None:
        if self.train_loop_obj.global_step == 7:
            self.train_loop_obj.optimizer.param_groups[0]["lr"] *= 0.5


class HalvesDecay(AbstractCallback):
    def on_epoch_end(self) -> None:
        self.train_loop_obj.optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.long
@pytest.mark.parametrize("halves", [Halves, HalvesInABatch])
def test_a_learning_rate_that_changes_stays_in_the_graph(halves: type[AbstractCallback]) -> None:
    loop, counts = make_loop(), Counts()
    with warnings_are_errors():
        loop.fit(num_epochs=2, callbacks=[halves("halves"), counts])
    check(loop, by_hand(sgd, lr=0.5))
    assert (counts.began, counts.ended, loop.total_iteration_idx) == (14, 14, 13)


@pytest.mark.long
def test_another_setting_that_changes_counts() -> None:
    compiled, plain = make_loop(), make_loop(compile=False)
    with pytest.warns(UserWarning, match="the optimizer's weight_decay changed"):
        compiled.fit(num_epochs=2, callbacks=[HalvesDecay("halves")])
    plain.fit(num_epochs=2, callbacks=[HalvesDecay("halves")])
    check(compiled, list(plain.model.state_dict().values()))


class WholeSteps(AbstractCallback):
    """Counts the steps that the graph has done: after these, and no others, the parameters have its gradients."""

    def __init__(self) -> None:
        super().__init__("whole steps")
        self.seen: list[bool] = []
        self.rates: list[float] = []

    def on_batch_begin(self) -> None:
        self.rates.append(self.train_loop_obj.optimizer.param_groups[0]["lr"])

    def on_after_optimizer_step(self) -> None:
        self.seen.append(getattr(self.train_loop_obj.running, "_attached", False))

    @property
    def count(self) -> int:
        return sum(self.seen)


def scheduled_by_hand(optimizer_of: Any, make_scheduler: Any, interval: str, norm: float | None) -> Any:
    model = Net().double()
    optimizer = optimizer_of(model.parameters())
    rates = reference.train_scheduled(
        model, loader(), optimizer, loss_of, 2, make_scheduler(optimizer), interval, max_norm=norm
    )
    return [t.detach() for t in model.state_dict().values()], rates


def warm_up(optimizer: optim.Optimizer) -> Any:
    rise = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [rise, lr_scheduler.CosineAnnealingLR(optimizer, 10)], [4])


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer_of, make_scheduler, interval, norm, made",
    [
        pytest.param(sgd, warm_up, "step", 0.5, False, id="each step"),
        pytest.param(
            adam, partial(lr_scheduler.StepLR, step_size=1, gamma=0.1), "epoch", None, True, id="made over it"
        ),
        pytest.param(
            adam,
            partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=14, cycle_momentum=False),
            "step",
            0.5,
            False,
            id="inductor",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.usefixtures("starts_processes")
def test_schedules_stay_in_the_graph(
    optimizer_of: Any, make_scheduler: Any, interval: Any, norm: float | None, made: bool
) -> None:
    """One graph for all rates; outside of it they are the numbers that a loop by hand has."""
    expected, rates = scheduled_by_hand(optimizer_of, make_scheduler, interval, norm)
    loop, steps = make_loop(optimizer_of=optimizer_of, gradient_clip_norm=norm), WholeSteps()
    scheduler = LRScheduler(make_scheduler(loop.optimizer) if made else make_scheduler, interval)
    # A recompilation would be refused after the first three: for train mode, the optimizer's state that is there now.
    with torch._dynamo.config.patch(recompile_limit=3), warnings_are_errors():
        loop.fit(num_epochs=2, callbacks=[scheduler, steps])
    check(loop, expected)
    assert steps.rates == rates
    assert len(set(rates)) > 1
    assert type(loop.optimizer.param_groups[0]["lr"]) is float
    assert steps.count == 12  # all but the two short ones


def test_a_wrapper_around_a_schedulers_mark_is_seen() -> None:
    loop, calls = make_loop(), []
    lr_scheduler.StepLR(loop.optimizer, 1)
    marked = loop.optimizer.step

    @functools.wraps(marked)
    def step(*args: Any) -> Any:
        calls.append(1)
        return marked(*args)

    loop.optimizer.step = step
    with pytest.warns(UserWarning, match="observes the optimizer's steps"):
        loop.fit(num_epochs=2)
    assert len(calls) == 14
    check(loop, by_hand(sgd))


@pytest.mark.long
@pytest.mark.parametrize("amp", [False, "bf16"])
def test_a_run_that_is_resumed_ends_with_the_same_weights(amp: Any, tmp_path: Path) -> None:
    """In the midst of an epoch and of a schedule, into the graph again; with autocast as eager steps have it."""

    dtype = torch.float if amp else torch.double  # autocast leaves float64 alone

    def run(folder: str, steps: int, **options: Any) -> TrainLoop:
        fits = {name: options.pop(name) for name in ("resume_from",) if name in options}
        loop = make_loop(dtype=dtype, optimizer_of=adam, use_amp=amp, seed=3, gradient_clip_norm=0.5, **options)
        saves = ModelCheckpoint(tmp_path / folder, every_n_epochs=None, every_n_steps=5)
        schedule = LRScheduler(lr_scheduler.ExponentialLR, "step", gamma=0.8)
        with warnings_are_errors():
            loop.fit(num_iterations=steps, callbacks=[schedule, saves, whole := WholeSteps()], **fits)
        assert bool(whole.count) == (options.get("compile") is not False)
        return loop

    whole = run("whole", 14)
    first, *_ = sorted((tmp_path / "whole").rglob("*.pt"), key=lambda path: path.stat().st_mtime)  # of step 5
    resumed = run("parts", 14, resume_from=first)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert resumed.history["loss"] == whole.history["loss"]
    eager = run("eager", 14, compile=False)
    torch.testing.assert_close(whole.model.state_dict(), eager.model.state_dict(), rtol=0, atol=2e-3 if amp else 1e-5)


class SetsTraining(AbstractCallback):
    """The first layer is trained from the second epoch on, or no more."""

    def __init__(self, hook: str, trained: bool) -> None:
        super().__init__("sets training")
        self.trained = trained
        setattr(self, hook, self.set_at_step_7)

    def set_at_step_7(self) -> None:
        if self.train_loop_obj.global_step == 7:
            self.train_loop_obj.model.layers[0].requires_grad_(self.trained)


@pytest.mark.long
@pytest.mark.parametrize(
    "trained, hook",
    [
        (True, "on_epoch_begin"),
        (False, "on_batch_begin"),
        pytest.param(True, "on_batch_begin", marks=pytest.mark.slow),
        pytest.param(False, "on_epoch_begin", marks=pytest.mark.slow),
    ],
)
def test_layers_frozen_and_unfrozen_later(hook: str, trained: bool) -> None:
    model = Net()
    model.layers[0].requires_grad_(not trained)
    loop = make_loop(model)
    with pytest.warns(UserWarning, match="parameters were frozen, unfrozen or added"):
        loop.fit(num_epochs=2, callbacks=[SetsTraining(hook, trained)])

    expected = Net().double()
    optimizer = sgd(expected.parameters())
    for trains in (not trained, trained):
        expected.layers[0].requires_grad_(trains)
        reference.train(expected, loader(), optimizer, loss_of, num_epochs=1)
    check(loop, [t.detach() for t in expected.state_dict().values()])


class Hooks(AbstractCallback):
    """Adds the hook in the second epoch."""

    def on_epoch_begin(self) -> None:
        if self.train_loop_obj.epoch == 1:
            stop_gradients(self.train_loop_obj.model)


def stop_gradients(model: Any) -> None:
    def stop(parameter: Tensor) -> None:
        parameter.grad.zero_()

    model.layers[0].weight.register_post_accumulate_grad_hook(stop)


@pytest.mark.long
@pytest.mark.parametrize("later", [False, True])
def test_hooks_after_a_gradient_are_called(later: bool) -> None:
    loops = [make_loop(compile=compiles) for compiles in ("step", False)]
    for loop in loops:
        if not later:
            stop_gradients(loop.model)
    compiled, plain = loops
    callbacks = [Hooks("hooks")] if later else []
    with pytest.warns(UserWarning, match="hooks of parameters"):
        compiled.fit(num_epochs=2, callbacks=callbacks)
    plain.fit(num_epochs=2, callbacks=callbacks)
    check(compiled, list(plain.model.state_dict().values()))


@pytest.mark.long
def test_gradients_of_parameters_in_no_optimizer_count_in_the_norm() -> None:
    """A graph does not compute them, so steps run without it."""
    weights = []
    for compiles in ("step", False):
        model = Net().double()
        loop = make_loop(model, lambda _, model=model: sgd(model.layers[3].parameters()), compile=compiles)
        loop.gradient_clip_norm = 0.01
        with pytest.warns(UserWarning, match=r"in no optimizer(: the graph does not compute|, so training does not)"):
            loop.fit(num_epochs=2)
        weights.append(list(model.state_dict().values()))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.long
def test_fits_of_a_process_do_not_use_up_dynamo_s_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeStepTraining, "backend", "eager")
    with torch._dynamo.config.patch(recompile_limit=2), warnings_are_errors():
        for _ in range(4):
            make_loop().fit(num_epochs=1)


@pytest.mark.long
def test_what_only_reads_the_rate_leaves_the_graph(tmp_path: Path) -> None:
    loop, monitor = make_loop(), LearningRateMonitor()
    with warnings_are_errors():
        loop.fit(num_epochs=2, callbacks=[TensorBoard(tmp_path, 1), monitor])
    check(loop, by_hand(sgd))
    assert loop.history.steps("lr") == [0.1] * 14


@pytest.mark.long
def test_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be True, False, 'step' or a dict"):
        make_loop(compile="steps")


@pytest.mark.long
@pytest.mark.parametrize("optimizer_of", [sgd, partial(optim.AdamW, lr=1e-2)], ids=["sgd", "adamw"])
def test_what_a_step_changes_stays_in_its_place(
    optimizer_of: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch makes no CUDA graph, and says nothing, of one that writes to an input whose address may change."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import TracingContext

    found: list[tuple[set[int], set[int]]] = []

    def look(graph: Any, inputs: Any) -> Any:
        context = TracingContext.get()
        assert context.fw_metadata is not None
        found.append(
            (set(context.fw_metadata.mutated_inp_runtime_indices), set(context.fw_metadata.static_input_indices))
        )
        return graph.forward

    monkeypatch.setattr(WholeStepTraining, "backend", staticmethod(aot_autograd(fw_compiler=look)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile='step'")
        make_loop(optimizer_of=optimizer_of).fit(num_epochs=1)
    assert found
    for changed, stay in found:
        assert changed
        assert changed <= stay, f"{len(changed - stay)} of {len(changed)} may be elsewhere in the next step"


class Notes(AbstractCallback):
    """Changes the loop in the second epoch."""

    def __init__(self, change: Any, hook: str, called: list[int]) -> None:
        super().__init__("notes")
        self.change, self.hook, self.called = change, hook, called

    def on_epoch_begin(self) -> None:
        if self.hook == "on_epoch_begin" and self.train_loop_obj.epoch == 1:
            self.change(self.train_loop_obj, self.called)

    def on_batch_begin(self) -> None:
        if self.hook == "on_batch_begin" and self.train_loop_obj.global_step == 8:
            self.change(self.train_loop_obj, self.called)


def another_criterion(loop: Any, called: list[int]) -> None:
    loop.criterion = nn.CrossEntropyLoss(label_smoothing=0.5)


def another_optimizer(loop: Any, called: list[int]) -> None:
    loop.optimizer = sgd(loop.model.parameters())  # with the same settings


def several_optimizers(loop: Any, called: list[int]) -> None:
    loop.optimizer = MultiOptimizer([sgd(loop.model.parameters())])


def smaller_norm(loop: Any, called: list[int]) -> None:
    loop.gradient_clip_norm = 0.01


def another_reduction(loop: Any, called: list[int]) -> None:
    loop.criterion.reduction = "sum"


def hook_of_the_optimizer(loop: Any, called: list[int]) -> None:
    loop.optimizer.register_step_post_hook(lambda *_: called.append(1))


def hook_of_a_gradient(loop: Any, called: list[int]) -> None:
    loop.model.layers[0].weight.register_hook(lambda gradient: 2 * gradient)


def hook_of_all_modules(loop: Any, called: list[int]) -> None:
    nn.modules.module.register_module_forward_hook(
        lambda module, _, output: 2 * output if isinstance(module, nn.Tanh) else None
    )


def hook_of_backward(loop: Any, called: list[int]) -> None:
    loop.model.layers[2].register_full_backward_hook(lambda _, inputs, outputs: (2 * inputs[0],))


def hook_of_forward(loop: Any, called: list[int]) -> None:
    loop.model.layers[2].register_forward_hook(lambda *of_call: 2 * of_call[-1])


def hook_of_the_criterion(loop: Any, called: list[int]) -> None:
    loop.criterion.register_forward_hook(lambda *of_call: 2 * of_call[-1])


def another_callback(loop: Any, called: list[int]) -> None:
    class Calls(AbstractCallback):
        def on_after_gradient_update(self, optimizer_idx: int) -> None:
            called.append(1)

    loop.callbacks = [*loop.callbacks, Calls("calls")]


@pytest.mark.long
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_batch_begin"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_criterion, "criterion was assigned"),
        (another_optimizer, "optimizer was assigned"),
        (several_optimizers, "(several optimizers|optimizer was assigned)"),
        (smaller_norm, "gradient_clip_norm was assigned"),
        (another_reduction, "a sum over samples"),
        (hook_of_the_optimizer, "observes the optimizer"),
        (another_callback, "on_after_gradient_update of calls"),
        (hook_of_a_gradient, "hooks of parameters"),
        (hook_of_all_modules, "hooks of all modules"),
        (hook_of_backward, "backwards hooks"),
        (hook_of_forward, None),
        (hook_of_the_criterion, None),
    ],
)
def test_what_a_callback_changes_later_is_not_lost_in_the_graph(change: Any, reason: str | None, hook: str) -> None:
    found = []
    for compiles in ("step", False):
        torch._dynamo.reset()
        loop, called = make_loop(compile=compiles, gradient_clip_norm=1.0), []  # type: ignore[var-annotated]
        loop.criterion = nn.CrossEntropyLoss()
        epochs = 3 if change is another_callback else 2  # it takes effect at the next epoch
        with pytest.warns(UserWarning, match=reason) if compiles and reason else warnings_are_errors():
            loop.fit(num_epochs=epochs, callbacks=[Notes(change, hook, called)])
        torch.nn.modules.module._global_forward_hooks.clear()
        found.append([*loop.model.state_dict().values(), torch.tensor(loop.history["loss"]), torch.tensor(called)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)
