"""AIToolbox's schedulers and small callbacks, against torch's own in a hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn, optim
from torch.optim import lr_scheduler

from small_loop import make_loop
from trainloop import AbstractCallback
from trainloop.compat.aitoolbox.callbacks import DistributedSamplerSetEpoch
from trainloop.compat.aitoolbox.optim import (
    AbstractScheduler,
    GeneralLRSchedulerCallback,
    LambdaLRScheduler,
    MultiStepLRScheduler,
    StepLRScheduler,
)
from trainloop.errors import ConfigurationError


class Rates(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("rates", execution_order=1000)
        self.epochs: list[float] = []

    def on_epoch_end(self) -> None:
        self.epochs.append(self.train_loop_obj.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: StepLRScheduler(2, gamma=0.5), lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5)),
        (lambda: MultiStepLRScheduler([1, 3]), lambda o: lr_scheduler.MultiStepLR(o, [1, 3])),
        (lambda: LambdaLRScheduler(lambda n: 0.5**n), lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5**n)),
        (
            lambda: GeneralLRSchedulerCallback(lr_scheduler.ExponentialLR, gamma=0.5),
            lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        ),
    ],
    ids=["StepLRScheduler", "MultiStepLRScheduler", "LambdaLRScheduler", "GeneralLRSchedulerCallback"],
)
def test_schedulers_are_torch_s_own(make: Any, expected: Any) -> None:
    optimizer = optim.SGD([nn.Parameter(nn.Linear(1, 1).weight)], lr=0.1)
    scheduler, rates = expected(optimizer), []
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    loop, seen, callback = make_loop(), Rates(), make()
    loop.fit(num_epochs=4, callbacks=[callback, seen])
    assert seen.epochs == rates
    assert isinstance(callback, AbstractScheduler)


def test_a_function_of_steps_or_of_epochs() -> None:
    with pytest.raises(ConfigurationError, match="execute_epoch_end=True, execute_batch_end=True: exactly one must be"):
        LambdaLRScheduler(float, execute_epoch_end=True, execute_batch_end=True)


class Sampler:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_set_epoch_of_samplers_that_the_loop_cannot_see() -> None:
    samplers = Sampler(), Sampler()
    make_loop().fit(num_epochs=3, callbacks=[DistributedSamplerSetEpoch(samplers[0], None, samplers[1])])
    assert [sampler.epochs for sampler in samplers] == [[0, 1, 2], [0, 1, 2]]
