"""Parameters that a model gets after it was wrapped: an error, in place of gradients of one rank only."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from trainloop.errors import ConfigurationError
from trainloop.optim.parameters import note_registrations


class AddedParameters:
    """Find parameters that were added to a model, or replaced, since the creation of this object.

    A look at all parameters in every forward would cost time. Torch's hooks note that a module of the process has
    registered something, and only then the next :meth:`refuse` looks.
    """

    def __init__(self) -> None:
        self._registered = False
        itself = weakref.ref(self)

        def note(module: nn.Module, name: str, value: Any) -> None:
            if (living := itself()) is not None:
                living._registered = True

        weakref.finalize(self, note_registrations(note).close).atexit = False

    def __bool__(self) -> bool:
        return self._registered

    def refuse(self, module: nn.Module, wrapper: str, known: Collection[int], ignored: Collection[str]) -> list[Any]:
        """Raise an error if the module has a parameter that needs a gradient and was not there before.

        Parameters
        ----------
        module : nn.Module
        wrapper : str
            Name of the class that has wrapped the module.
        known : collection of int
            Ids of the parameters that the module had.
        ignored : collection of str
            Names of parameters that are none of the wrapper's affair.

        Returns
        -------
        list of nn.Parameter
            Frozen parameters that were added.
        """
        named = module.named_parameters()
        added = {name: p for name, p in named if id(p) not in known and name not in ignored}
        names = [name for name, p in added.items() if p.requires_grad]
        if names:
            raise ConfigurationError(
                f"{', '.join(names[:5])}: added to the model after {wrapper} wrapped it, so their gradients would not "
                "be averaged over ranks. Add or replace parameters first, and wrap the model then."
            )
        self._registered = False
        return list(added.values())
