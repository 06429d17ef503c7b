"""Send classes by value, without running again what the user's code does when a class is defined."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Iterator, Sequence
from typing import Any

from cloudpickle import cloudpickle

from trainloop._transfer.users_modules import is_users


def reduce_class(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return cloudpickle's reduction of a class, changed in four points.

    * Metaclasses and ``__init_subclass__`` of the user's are not called again: their effects are sent with the class,
      and with the user's variables, such as registries. They may need keywords, and refuse a name that they know.
    * The same class is not made again, if several pickles contain it.
    * A nested class keeps its qualified name.
    * The class keeps its slots. Without them, instances would have a ``__dict__``, and the sender's class can't load
      the state of such an instance.
    """
    if len(reduced) < 6 or issubclass(kind, enum.Enum):  # not by value; an Enum has other arguments
        return reduced
    _, (metaclass, name, bases, namespace, tracker_id, _), *rest = reduced
    namespace = {**namespace, "__qualname__": kind.__qualname__}
    if "__slots__" in vars(kind) and not issubclass(kind, tuple):  # a tuple has no slots of its own
        namespace["__slots__"] = vars(kind)["__slots__"]
    maker = next(one for one in metaclass.__mro__ if not is_users(one.__module__))
    hooked = [one for one in kind.__mro__[1:] if "__init_subclass__" in vars(one) and is_users(one.__module__)]
    return _made, (maker, metaclass, name, bases, namespace, tracker_id, hooked), *rest


def _made(
    maker: Any,
    metaclass: type,
    name: str,
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    tracker_id: str,
    hooked: Sequence[type],
) -> type:
    """Make a class, or return the one that this process has under the same ID."""
    found: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if found is not None:
        return found
    with contextlib.ExitStack() as undo:
        for base in hooked:
            undo.enter_context(_unhooked(base))
        if maker is metaclass:  # no metaclass of the user's
            made = types.new_class(name, bases, {"metaclass": metaclass}, lambda own: own.update(namespace))
        else:  # as types.new_class does
            resolved = types.resolve_bases(bases)
            generic = {} if resolved is bases else {"__orig_bases__": bases}
            made = maker.__new__(metaclass, name, resolved, {**namespace, **generic})
    tracked: type = cloudpickle._lookup_class_or_track(tracker_id, made)
    return tracked


@contextlib.contextmanager
def _unhooked(base: Any) -> Iterator[None]:
    """Let the ``__init_subclass__`` of a class only call the one of the next class."""
    own = vars(base).get("__init_subclass__")
    if own is None:  # a class that refers to the new one, and is not complete yet
        yield
        return

    def next_one(cls: type, **keywords: Any) -> None:
        super(base, cls).__init_subclass__(**keywords)

    type.__setattr__(base, "__init_subclass__", classmethod(next_one))
    try:
        yield
    finally:
        type.__setattr__(base, "__init_subclass__", own)
