"""Send classes by value, without running again what the user's code does when a class is defined."""

from __future__ import annotations

import contextlib
import enum
import types
import typing
from collections.abc import Callable, Iterator, Sequence
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
    if len(reduced) < 6:  # not by value
        return reduced
    if issubclass(kind, enum.Enum):
        return _reduce_enum(kind, reduced)
    _, (metaclass, name, bases, namespace, tracker_id, _), *rest = reduced
    namespace = {**namespace, "__qualname__": kind.__qualname__}
    if "__slots__" in vars(kind) and not issubclass(kind, tuple):  # a tuple has no slots of its own
        namespace["__slots__"] = vars(kind)["__slots__"]
    made = (tracker_id, _hooked(kind), _class, _maker(metaclass), metaclass, name, bases, namespace)
    return _made, made, *rest


def _maker(metaclass: type) -> type:
    """Return the first class of a metaclass's order that is not the user's."""
    return next(one for one in metaclass.__mro__ if not is_users(one.__module__))


def _hooked(kind: type) -> list[type]:
    """Return the bases that are the user's and have an ``__init_subclass__``."""
    return [one for one in kind.__mro__[1:] if "__init_subclass__" in vars(one) and is_users(one.__module__)]


def _reduce_enum(kind: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the reduction of an Enum with its metaclass, its aliases and combined flags, and members' attributes."""
    _, (bases, name, qualname, _, module, tracker_id, _), (namespace, slots), *rest, set_state = reduced
    members = kind.__members__
    namespace = {key: value for key, value in namespace.items() if key not in members}
    # What ``__new__`` and ``__init__``, which are not called again, have set. Names such as ``_value_`` are Python's.
    attributes = {
        key: {own: value for own, value in vars(member).items() if not (own[0] == own[-1] == "_")}
        for key, member in members.items()
    }
    values = {key: member._value_ for key, member in members.items()}
    made = (tracker_id, _hooked(kind), _enum, _maker(type(kind)), type(kind), name, qualname, bases, values, module)
    return _made, made, (set_state, (namespace, slots), attributes), *rest, _set_enum


_MEMBER: Callable[[Any], Any] = getattr(enum, "member", lambda value: value)  # since Python 3.11


def _enum(
    maker: Any, metaclass: type, name: str, qualname: str, bases: tuple[type, ...], values: dict[str, Any], module: str
) -> type:
    namespace = maker.__prepare__(name, bases)
    for key, value in values.items():
        namespace[key] = _MEMBER(value) if callable(value) else value
    made: type = maker.__new__(metaclass, name, bases, namespace)
    made.__module__, made.__qualname__ = module, qualname
    return made


def _set_enum(kind: Any, state: Any) -> None:
    set_state, of_class, attributes = state
    set_state(kind, of_class)
    for key, own in attributes.items():
        vars(kind.__members__[key]).update(own)


def _made(tracker_id: str, hooked: Sequence[type], make: Callable[..., type], *arguments: Any) -> type:
    """Make a class, or return the one that this process has under the same ID."""
    found: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if found is not None:
        return found
    with contextlib.ExitStack() as undo:
        for base in hooked:
            undo.enter_context(_unhooked(base))
        made = make(*arguments)
    tracked: type = cloudpickle._lookup_class_or_track(tracker_id, made)
    return tracked


def _class(maker: Any, metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    if maker is metaclass:  # no metaclass of the user's
        return types.new_class(name, bases, {"metaclass": metaclass}, lambda own: own.update(namespace))
    resolved = types.resolve_bases(bases)  # as types.new_class does
    generic = {} if resolved is bases else {"__orig_bases__": bases}
    made: type = maker.__new__(metaclass, name, resolved, {**namespace, **generic})
    return made


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


def reduce_named_type(obj: Any) -> tuple[Any, ...]:
    """Return the reduction by value of a ``NewType`` or of a parameter of a generic type, which have names only."""
    known = [obj.__supertype__] if isinstance(obj, typing.NewType) else []
    return _named_type, (type(obj), obj.__name__, obj.__module__, *known)


def _named_type(kind: Any, name: str, module: str, *known: Any) -> Any:
    made = kind(name, *known)
    made.__module__ = module
    return made
