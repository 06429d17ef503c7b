"""The attributes that an object keeps when it is pickled."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["kept_attributes", "unparametrized_class"]


def kept_attributes(obj: object) -> dict[str, Any]:
    """Return the attributes that pickling an object keeps, according to its ``__getstate__``.

    Attributes that it leaves out (weak references, locks, files) are missing; attributes that it replaces are replaced:
    an attribute is sent unchanged if ``kept_attributes(obj)[name] is obj.__dict__[name]``. Empty if the state is not a
    dictionary, or if pickling is refused.
    """
    kind = unparametrized_class(type(obj))
    get_state = getattr(kind, "__getstate__", None)
    if get_state is None or get_state is getattr(object, "__getstate__", None):
        return dict(getattr(obj, "__dict__", {}))
    try:
        state = get_state(obj)
    except Exception:  # whatever a user's __getstate__ raises: pickling itself will report it
        return {}
    if isinstance(state, tuple) and len(state) == 2:  # a pair: attributes, and those in slots
        state = state[0]
    return dict(state) if isinstance(state, dict) else {}


def unparametrized_class(kind: type) -> type:
    """Return the class that a parametrized module had before; any other class unchanged.

    ``torch.nn.utils.parametrize`` gives a module a new class, whose ``__getstate__`` raises.
    """
    own = vars(kind).get("__getstate__")
    return kind.__bases__[0] if getattr(own, "__qualname__", "") == _REFUSES and issubclass(kind, nn.Module) else kind


_REFUSES = "_inject_new_class.<locals>.getstate"
