"""Keywords that nothing here has: an error that names the right one, also for the names of other libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from trainloop.errors import UnknownArgumentError

__all__ = [
    "keywords_of",
    "knows_foreign_names",
    "meant",
    "nearest",
    "refuse",
    "suggested",
    "table_of",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def table_of(foreign: Mapping[str, str]) -> dict[str, str]:
    """A table whose keys are several names each, as one of single names."""
    return {name: here for names, here in foreign.items() for name in names.split()}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like a name; ``None`` if none is as like it as ``cutoff``, 1 being the same."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def suggested(name: str, own: Iterable[str]) -> str:
    """The end of a message: the nearest of a function's own arguments, or else all of them."""
    own = list(own)
    close = nearest(name.lower(), own)
    if close is not None:
        return f". Did you mean {close}=?"
    return f". It has: {', '.join(own)}." if own else ". It has no arguments."


def meant(name: str, own: Iterable[str], foreign: Mapping[str, str]) -> str:
    """The end of a message: what another library's argument is here, if that is one of ``own``; else the nearest.

    A hint that begins with a colon is not about an argument.
    """
    own = list(own)
    here = foreign.get(name.lower(), "")
    if here.startswith(":"):
        return f"{here}."
    return f". Did you mean {here}?" if here.partition("=")[0] in own else suggested(name, own)


def refuse(function: str, unknown: Iterable[str], meaning: Callable[[str], str]) -> None:
    """Raise for unknown keywords of a function, each with what it may have meant.

    Raises
    ------
    UnknownArgumentError
        If there is any.
    """
    messages = [f"{function}() got an unexpected keyword argument {name!r}{meaning(name)}" for name in unknown]
    if messages:
        raise UnknownArgumentError("\n".join(messages))


def keywords_of(kind: type) -> list[str]:
    """What a class takes by keyword, also where it hands ``**kwargs`` up to its bases."""
    known: dict[str, None] = {}
    for cls in kind.__mro__[:-1]:
        if "__init__" in vars(cls):
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
            known |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(known)


def knows_foreign_names(foreign: Mapping[str, str]) -> Callable[[Function], Function]:
    """Make a function refuse unknown keywords with a hint, before it is called.

    Parameters
    ----------
    foreign : mapping of str to str
        Other libraries' names, several with spaces between, to the argument here: ``{"n_trials": "num_trials="}``.
    """
    table = table_of(foreign)

    def decorate(function: Function) -> Function:
        own = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            refuse(name, [key for key in kwargs if key not in own], lambda key: meant(key, own, table))
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]  # of the same signature

    return decorate


# Of the wrappers, and of `fit(ddp_model_args=...)` and its like. Those of FSDP are of torch's first version of it.
WRAPPERS = table_of(
    {
        "default_model_methods transfer_model_attributes":
            ": every attribute and method of the model is reachable through the wrapper, without naming it",
        "find_unused find_unused_params unused_parameters": "find_unused_parameters=",
        "device device_id gpus gpu gpu_ids local_rank rank": "device_ids=, a list",
        "num_devices replicas_count num_replicas": "devices=",
        "auto_wrap_policy wrap_policy wrap wrap_cls units": "shard=[Block], the classes of blocks",
        "sharding_strategy": "reshard_after_forward=, and replicas= for several sharded copies",
        "mixed_precision": "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(...)",
        "cpu_offload": "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()",
        "device_mesh": "mesh=",
    }
)  # fmt: skip
