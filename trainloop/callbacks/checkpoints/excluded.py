"""Leave parts of the model out of checkpoints, and check that training does not change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainloop.checkpoint.file import Bits, bits_of, changed, names_under, without
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.optim.optimizers import optimizers_of

__all__ = ["ExcludedParts"]


class ExcludedParts:
    """Parts of the model that are left out of checkpoints.

    Parameters
    ----------
    names : sequence of str
        Names of modules, parameters or buffers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._before: Bits = {}

    def check(self, loop: Any) -> None:
        """Raise a ConfigurationError if the model does not have one of the parts, or if one is trained."""
        if not self.names:
            return
        names = list(loop.model.state_dict())
        for part in self.names:
            if not names_under(names, [part]):
                tops = dict.fromkeys(name.partition(".")[0] for name in names)
                raise ConfigurationError(
                    f"ModelCheckpoint: exclude={part!r}: the model has no such part. Use the name of a module, "
                    f"parameter or buffer: {', '.join(tops)}, or one inside these."
                )
        groups = [group for optimizer in optimizers_of(loop.optimizer) for group in optimizer.param_groups]
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        for name, parameter in loop.model.named_parameters():
            if id(parameter) in trained and names_under([name], self.names):
                raise ConfigurationError(
                    f"ModelCheckpoint: exclude={self.names!r} leaves out {name}, which is trained. Freeze it with "
                    "requires_grad_(False), or do not exclude it."
                )

    def begin(self, model: dict[str, Any]) -> None:
        """Note the parts' bits in the model's state, with which later states are compared."""
        self._before = self._bits(model)

    def removed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's state without the parts.

        Raises
        ------
        CheckpointError
            If training has changed one of them, so that the checkpoint could not be resumed.
        """
        moved = changed(self._before, self._bits(state["model"])) if self.names else []
        if moved:
            raise CheckpointError(
                f"ModelCheckpoint: {moved[0]} has changed in training, but exclude={self.names!r} leaves it out of "
                "checkpoints. Freeze it before fit with requires_grad_(False) and eval(), or do not exclude it."
            )
        return self.removed_unchecked(state)

    def removed_unchecked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's state without the parts, even if they have changed."""
        return without(state, self._before) if self.names else state

    def _bits(self, model: dict[str, Any]) -> Bits:
        return bits_of(model, names_under(model, self.names)) if self.names else {}
