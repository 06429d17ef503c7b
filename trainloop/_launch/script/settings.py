"""Process-wide settings of the caller, which are applied in its ranks and in the models' processes of a search.

A script chooses precision, determinism, log levels and the like in ``main()``, in the process that calls ``fit``. A
rank is another process: it receives the caller's settings and applies the ones that differ from its own. Workers that
are forked from the rank inherit them; others receive them through :class:`SettingsInit`. The caller's settings are
read, never changed.

To add a setting, add a line to :data:`SETTINGS`.
"""

from __future__ import annotations

import contextlib
import decimal
import gc
import importlib
import io
import locale
import logging
import multiprocessing
import pickle
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import __future__ as future
from torch._tensor_str import get_printoptions
from torch.backends import cuda, mha
from torch.distributions import Distribution, kl
from torch.nn.modules import module as modules
from torch.optim import optimizer as torch_optimizer
from torch.sparse import check_sparse_tensor_invariants as invariants
from torch.utils import _pytree
from torch.utils.data._utils.collate import default_collate_fn_map  # torch's documentation of default_collate names it
from torch.utils.hooks import RemovableHandle

from trainloop._support.user_line import set_user_place, user_place, warn
from trainloop._transfer.payload import LateNames, define_in_main
from trainloop._transfer.pickling import Pickler
from trainloop._transfer.users_modules import is_users

_LINE = "the line that warnings point to"  # sent with the settings, but not a setting itself: it differs between calls


@dataclass(frozen=True)
class Setting:
    """One process-wide setting."""

    name: str
    """Name in the documentation: the function or attribute by which a user sets it."""
    read: Callable[[], Any]
    """Function that returns the current value, comparable and picklable; it raises if this build lacks the setting."""
    write: Callable[[Any], object]
    """Function that sets a value that ``read`` returned."""
    of_work: bool = False
    """True if the values are the script's functions and objects, which its callbacks and models may use, too."""


def read_settings(*, only_of_work: bool = False) -> dict[str, Any]:
    """Return the current values of all settings of this process, or of those that go with the work, by name."""
    values = {}
    for setting in SETTINGS:
        if only_of_work and not setting.of_work:
            continue
        # torch refuses to read a deprecated switch after its successor was used; the table has the successor too.
        with contextlib.suppress(AttributeError, RuntimeError, ImportError):
            values[setting.name] = setting.read()
    return values


def settings_of_work() -> dict[str, Any]:
    """Return the settings that are sent together with the work, so that it does not get copies of their objects."""
    values = read_settings(only_of_work=True)
    for name in list(values):
        with contextlib.suppress(Exception):  # dumped_settings warns of a value that can't be sent
            _dumped(values[name])
            continue
        del values[name]
    return values


def dumped_settings(without: Container[str] = ()) -> bytes:
    """Return the settings as bytes, for :func:`apply_settings` in another process."""
    values = {_LINE: user_place(), **read_settings()}
    values = {name: value for name, value in values.items() if name not in without}
    try:
        return _dumped(values)
    except Exception:  # only values with a class or function that can't be sent fail; the others are sent
        kept = {}
        for name, value in values.items():
            try:
                _dumped(value)
                kept[name] = value
            except Exception as error:
                warn(f"this process's {name} can't be sent to other processes ({error}). They use the default.")
        return _dumped(kept)


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump((value, LateNames(pickler.main_names)))  # a warning's class may be defined in the script
    return file.getvalue()


def _loaded(dumped: bytes) -> Any:
    value, names = pickle.loads(dumped)
    define_in_main(names)
    return value


def apply_settings(dumped: bytes) -> None:
    """Apply another process's settings, in the order of the table; skip settings that are equal here."""
    values: dict[str, Any] = _loaded(dumped)
    if _LINE in values:
        set_user_place(values.pop(_LINE))
    write_settings(values)


class SentSettings:
    """The settings of this process in a pickle: unpickling applies them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return apply_settings, (dumped_settings(),)


def numeric_settings() -> dict[str, Any]:
    """Return the current values of the settings that affect a step's numbers, as plain types."""
    kept = ("torch.set_default_", "torch.set_float32", "torch.set_flush", "torch.backends.", "torch.use_determin")
    return {name: value for name, value in read_settings().items() if name.startswith(kept)}


def write_settings(values: dict[str, Any]) -> None:
    """Apply the result of :func:`read_settings`, in the order of the table; skip settings that are equal here."""
    own = {setting.name: setting for setting in SETTINGS}
    for name, value in values.items():
        if name not in own:  # a setting of another version
            continue
        setting = own[name]
        try:
            try:
                same = bool(setting.read() == value)
            except RuntimeError:  # a deprecated switch, see above
                same = False
            if not same:
                setting.write(value)
        except Exception as error:
            warn(f"this process could not apply the setting {name}={value!r} of the process that started it: {error}")


class SettingsInit:
    """A ``worker_init_fn`` that applies the settings of the sending process, then calls the user's function."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self.users = users
        self._settings = b""

    def __call__(self, worker_id: int) -> None:
        if self._settings:
            apply_settings(self._settings)
        if self.users is not None:
            self.users(worker_id)

    def __getstate__(self) -> dict[str, Any]:
        return {"users": self.users, "_settings": dumped_settings()}


# --------------------------------------------------------------------------------------------------------------------
# Settings that are more than an attribute
# --------------------------------------------------------------------------------------------------------------------


def _attribute(path: str) -> Setting:
    """Return a setting that is an attribute of ``torch``, or of an object in ``torch``."""
    *owners, name = path.split(".")

    def owner() -> Any:
        found: Any = torch
        for i, part in enumerate(owners[1:], 2):
            if not hasattr(found, part):  # PyTorch 2.6 does not import torch.backends.opt_einsum itself
                importlib.import_module(".".join(owners[:i]))
            found = getattr(found, part)
        return found

    return Setting(path, lambda: getattr(owner(), name), lambda value: setattr(owner(), name, value))


def _options(
    name: str,
    module: str,
    now: Callable[[Any], Mapping[str, Any]],
    defaults: Callable[[Any], Mapping[str, Any]],
    put: Callable[[Any, str, Any], object],
) -> Setting:
    """Return a setting for the changed options of a library; a process imports it only if there are any."""

    def read() -> dict[str, Any]:
        with contextlib.suppress(Exception):  # whatever another version of the library raises
            if module in sys.modules:
                initial = defaults(sys.modules[module])
                return {key: value for key, value in now(sys.modules[module]).items() if value != initial[key]}
        return {}

    def write(options: dict[str, Any]) -> None:
        for key in read().keys() - options.keys():  # for kept ranks
            put(sys.modules[module], key, defaults(sys.modules[module])[key])
        for key, value in options.items():
            put(importlib.import_module(module), key, value)

    return Setting(name, read, write)


def _config(path: str) -> Setting:
    """Return a setting for the changed options of a ``torch.compile`` config module, which is not imported here."""

    def read() -> dict[str, Any]:
        config = sys.modules.get(path)
        changed = getattr(config, "_get_dict", None)  # private: torch has no public list of changed options
        return {} if changed is None else changed(skip_default=True)

    def write(options: dict[str, Any]) -> None:
        config = importlib.import_module(path)
        for name, value in options.items():
            setattr(config, name, value)

    return Setting(path, read, write)


# Private names of pandas, scikit-learn and torch's compiler: they have no public list of defaults, either.


def _pandas_now(pandas: Any) -> dict[str, Any]:
    config = pandas._config.config
    places = {key: config._get_root(key) for key in config._registered_options}  # get_option warns of old options
    return {key: group[name] for key, (group, name) in places.items()}


def _pandas_defaults(pandas: Any) -> dict[str, Any]:
    return {key: option.defval for key, option in pandas._config.config._registered_options.items()}


def _read_start_method() -> str:
    method, known = multiprocessing.get_start_method(allow_none=True), multiprocessing.get_all_start_methods()
    return method if method in known else known[0]  # joblib's workers have one that it has registered


def _read_default_device() -> str | None:
    try:
        kind: str = torch.get_default_device().type
    except AttributeError:  # PyTorch 2.6 and 2.7 after set_default_device(None)
        return None
    # Leave out the index: in a rank, 'cuda' is the rank's own GPU.
    return None if kind == "cpu" else kind


def _read_flush_denormal() -> bool:
    return (torch.tensor([1e-310], dtype=torch.float64, device="cpu") * 1).item() == 0


def _read_autocast_dtypes() -> dict[str, torch.dtype]:
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")}


def _write_autocast_dtypes(dtypes: dict[str, torch.dtype]) -> None:
    for kind, dtype in dtypes.items():
        torch.set_autocast_dtype(kind, dtype)


def _write_safe_globals(classes: list[Any]) -> None:
    torch.serialization.add_safe_globals([c for c in classes if c not in torch.serialization.get_safe_globals()])


def _write_warning_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]  # in place: other modules refer to this list
    # In all versions, adding and removing a filter notifies the interpreter that filters have changed.
    warnings.simplefilter("ignore", _NoWarning)
    warnings.filters.remove(("ignore", None, _NoWarning, None, 0))  # type: ignore[attr-defined]


class _NoWarning(Warning):
    pass


# -- logging -----------------------------------------------------------------------------------------------------------

_STREAMS = ("stdout", "stderr")


def loggers() -> dict[str, logging.Logger]:
    """Return all loggers by name; the root logger's name is empty."""
    named = logging.root.manager.loggerDict
    return {"": logging.root, **{name: found for name, found in named.items() if isinstance(found, logging.Logger)}}


def _read_log_levels() -> dict[str, tuple[int, bool, bool]]:
    default = (logging.NOTSET, False, True)
    found = {name: (log.level, log.disabled, log.propagate) for name, log in loggers().items()}
    return {name: values for name, values in found.items() if values != default}


def _write_log_levels(levels: dict[str, tuple[int, bool, bool]]) -> None:
    for name, (level, disabled, propagate) in levels.items():
        log = logging.getLogger(name or None)
        log.setLevel(level)
        log.disabled, log.propagate = disabled, propagate


def _read_log_streams() -> dict[str, list[tuple[str, int, Any]]]:
    """Return each logger's handlers that write to a standard stream, such as the handler of ``logging.basicConfig``."""
    found: dict[str, list[tuple[str, int, Any]]] = {}
    for name, log in loggers().items():
        for handler in log.handlers:
            stream = standard_stream_of(handler)
            if stream is not None:
                found.setdefault(name, []).append((stream, handler.level, _formatter_of(handler)))
    return found


def standard_stream_of(handler: logging.Handler) -> str | None:
    """Return the name of the standard stream that a handler writes to; None for a handler that ranks do not get.

    Handlers of other classes, and filters, may depend on this process: see :mod:`trainloop._launch.output`.
    """
    if type(handler) is not logging.StreamHandler or handler.filters:
        return None
    stream = getattr(handler.stream, "_guarded", handler.stream)
    for name in _STREAMS:
        now = getattr(sys, name)
        if stream in (now, getattr(now, "_guarded", now), getattr(sys, f"__{name}__")):
            return name
    return None


def _formatter_of(handler: logging.Handler) -> bytes:
    """Pickle the handler's formatter, for comparisons; a formatter that can't be sent is pickled as ``None``."""
    try:
        return _dumped(handler.formatter)
    except Exception:  # whatever a class of the user's refers to
        return _dumped(None)


def _read_log_filters() -> dict[str, list[Any]]:
    return {name: list(log.filters) for name, log in loggers().items() if log.filters}


def _write_log_filters(filters: dict[str, list[Any]]) -> None:
    for name, added in filters.items():
        log = logging.getLogger(name or None)
        log.filters = log.filters or added  # a module that was imported here may have added them


def _read_capture() -> bool:
    return getattr(warnings.showwarning, "__module__", None) == "logging"


def _read_hooks_of_all() -> list[tuple[Any, Any, dict[str, bool]]]:
    """Return the hooks of every module and every optimizer: the function that registers each, the hook, arguments."""
    full = modules._global_is_full_backward_hook
    of_backward = modules.register_module_full_backward_hook if full else modules.register_module_backward_hook
    kinds: list[tuple[Any, Any]] = [
        (modules.register_module_forward_pre_hook, modules._global_forward_pre_hooks),
        (modules.register_module_full_backward_pre_hook, modules._global_backward_pre_hooks),
        (of_backward, modules._global_backward_hooks),
        (torch_optimizer.register_optimizer_step_pre_hook, torch_optimizer._global_optimizer_pre_hooks),
        (torch_optimizer.register_optimizer_step_post_hook, torch_optimizer._global_optimizer_post_hooks),
    ]
    found: list[tuple[Any, Any, dict[str, bool]]]
    found = [(register, hook, {}) for register, hooks in kinds for hook in hooks.values()]
    for number, hook in modules._global_forward_hooks.items():
        options = {
            "with_kwargs": number in modules._global_forward_hooks_with_kwargs,
            "always_call": number in modules._global_forward_hooks_always_called,
        }
        found.append((modules.register_module_forward_hook, hook, options))
    return found


_handles: list[tuple[Any, RemovableHandle]] = []
"""The hooks that another process has sent, as :func:`_read_hooks_of_all` returns them, and their handles."""


def _write_hooks_of_all(hooks: list[tuple[Any, Any, dict[str, bool]]]) -> None:
    for hook, handle in [(hook, handle) for hook, handle in _handles if hook not in hooks]:  # for kept ranks
        handle.remove()
        _handles.remove((hook, handle))
    here = _read_hooks_of_all()  # of modules that are imported here and register hooks
    for register, hook, options in hooks:
        if (register, hook, options) not in here:
            _handles.append(((register, hook, options), register(hook, **options)))


def _read_divergences() -> dict[tuple[type, type], Any]:
    # Private: there is no public way to read them; without it, nothing is sent.
    return {kinds: f for kinds, f in kl._KL_REGISTRY.items() if f.__module__ != kl.__name__}


def _write_divergences(functions: dict[tuple[type, type], Any]) -> None:
    for kinds, function in functions.items():
        kl.register_kl(*kinds)(function)


def _read_nodes() -> dict[type, tuple[Any, Any]]:
    nodes = _pytree.SUPPORTED_NODES.items()
    return {cls: (node.flatten_fn, node.unflatten_fn) for cls, node in nodes if is_users(cls.__module__)}


def _write_nodes(functions: dict[type, tuple[Any, Any]]) -> None:
    for cls, (flatten, unflatten) in functions.items():
        if cls not in _pytree.SUPPORTED_NODES:
            _pytree.register_pytree_node(cls, flatten, unflatten)


def _write_next_hook(number: int) -> None:
    RemovableHandle.next_id = max(RemovableHandle.next_id, number)


def _write_log_streams(handlers: dict[str, list[tuple[str, int, Any]]]) -> None:
    for name, made in handlers.items():
        log = logging.getLogger(name or None)
        if log.handlers:  # added by a module that was imported here
            continue
        for stream, level, formatter in made:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(level)
            handler.setFormatter(_loaded(formatter))
            log.addHandler(handler)


# --------------------------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------------------------

SETTINGS: list[Setting] = [
    # first, so that the filters apply to warnings from the settings below
    Setting("warnings.filterwarnings", lambda: list(warnings.filters), _write_warning_filters),
    # before the settings that create loggers
    Setting("logging.setLoggerClass", logging.getLoggerClass, logging.setLoggerClass),
    Setting("logging.setLogRecordFactory", logging.getLogRecordFactory, logging.setLogRecordFactory, of_work=True),
    Setting("logging.captureWarnings", _read_capture, logging.captureWarnings),
    Setting("logging.disable", lambda: logging.root.manager.disable, logging.disable),
    Setting("logging.Logger.setLevel", _read_log_levels, _write_log_levels),
    Setting("logging.basicConfig", _read_log_streams, _write_log_streams),
    Setting("logging.Logger.addFilter", _read_log_filters, _write_log_filters, of_work=True),
    # numbers
    Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch.set_default_device", _read_default_device, torch.set_default_device),
    # The deprecated switch changes the new switches, too, so it is applied first.
    Setting(
        "torch.set_float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    _attribute("torch.backends.cuda.matmul.allow_tf32"),
    _attribute("torch.backends.cudnn.allow_tf32"),
    _attribute("torch.backends.fp32_precision"),
    _attribute("torch.backends.cuda.matmul.fp32_precision"),
    _attribute("torch.backends.cudnn.fp32_precision"),
    _attribute("torch.backends.cudnn.conv.fp32_precision"),
    _attribute("torch.backends.cudnn.rnn.fp32_precision"),
    _attribute("torch.backends.mkldnn.fp32_precision"),
    _attribute("torch.backends.mkldnn.matmul.fp32_precision"),
    _attribute("torch.backends.mkldnn.conv.fp32_precision"),
    _attribute("torch.backends.mkldnn.rnn.fp32_precision"),
    _attribute("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    _attribute("torch.backends.cuda.matmul.allow_fp16_accumulation"),
    Setting("torch.set_flush_denormal", _read_flush_denormal, torch.set_flush_denormal),
    Setting("torch.set_autocast_dtype", _read_autocast_dtypes, _write_autocast_dtypes),
    Setting("torch.set_autocast_cache_enabled", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting("numpy.seterrcall", np.geterrcall, np.seterrcall, of_work=True),
    Setting("numpy.seterr", np.geterr, lambda value: np.seterr(**value)),
    # determinism
    Setting(
        "torch.use_deterministic_algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _attribute("torch.utils.deterministic.fill_uninitialized_memory"),
    _attribute("torch.backends.cudnn.deterministic"),
    _attribute("torch.backends.mkldnn.deterministic"),
    # choice of kernels
    _attribute("torch.backends.cudnn.enabled"),
    _attribute("torch.backends.cudnn.benchmark"),
    _attribute("torch.backends.cudnn.benchmark_limit"),
    _attribute("torch.backends.mkldnn.enabled"),
    _attribute("torch.backends.quantized.engine"),
    _attribute("torch.backends.opt_einsum.enabled"),
    _attribute("torch.backends.opt_einsum.strategy"),
    Setting("torch.backends.cuda.enable_flash_sdp", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    Setting(
        "torch.backends.cuda.enable_mem_efficient_sdp", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
    ),
    Setting("torch.backends.cuda.enable_math_sdp", cuda.math_sdp_enabled, cuda.enable_math_sdp),
    Setting("torch.backends.cuda.enable_cudnn_sdp", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    Setting(
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    # Their names, not torch's enums: the recorder of failures writes plain values.
    Setting(
        "torch.backends.cuda.preferred_linalg_library",
        lambda: str(cuda.preferred_linalg_library()).rpartition(".")[2].lower(),
        cuda.preferred_linalg_library,
    ),
    Setting(
        "torch.backends.cuda.preferred_blas_library",
        lambda: str(cuda.preferred_blas_library()).rpartition(".")[2].lower(),
        cuda.preferred_blas_library,
    ),
    Setting("torch.backends.mha.set_fastpath_enabled", mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    # checks
    Setting(
        "torch.autograd.set_detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    Setting(
        "torch.sparse.check_sparse_tensor_invariants",
        invariants.is_enabled,
        lambda value: (invariants.enable if value else invariants.disable)(),
    ),
    Setting(
        "torch.distributions.Distribution.set_default_validate_args",
        lambda: Distribution._validate_args,  # private: there is no public function; without it, nothing is sent
        Distribution.set_default_validate_args,
    ),
    Setting("torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
    # processes and pickles (a spawned rank would spawn its children by default)
    Setting(
        "multiprocessing.set_start_method",
        _read_start_method,
        lambda value: multiprocessing.set_start_method(value, force=True),
    ),
    Setting(
        "torch.multiprocessing.set_sharing_strategy",
        lambda: torch.multiprocessing.get_sharing_strategy(),
        lambda value: torch.multiprocessing.set_sharing_strategy(value),
    ),
    Setting(
        "torch.serialization.add_safe_globals",
        lambda: sorted(torch.serialization.get_safe_globals(), key=repr),  # torch returns a set's order, which varies
        _write_safe_globals,
    ),
    Setting(
        "torch.nn.modules.module.register_module_forward_hook", _read_hooks_of_all, _write_hooks_of_all, of_work=True
    ),
    # Pickled hooks of modules and tensors keep their numbers: a new hook must not replace one of them.
    Setting("torch.utils.hooks.RemovableHandle", lambda: RemovableHandle.next_id, _write_next_hook),
    # Functions that a script registers: torch looks them up by classes.
    Setting("torch.distributions.register_kl", _read_divergences, _write_divergences),
    Setting("default_collate_fn_map", lambda: dict(default_collate_fn_map), default_collate_fn_map.update),
    Setting("torch.utils._pytree.register_pytree_node", _read_nodes, _write_nodes),
    Setting(
        "torch.__future__.set_overwrite_module_params_on_conversion",
        future.get_overwrite_module_params_on_conversion,
        future.set_overwrite_module_params_on_conversion,
    ),
    Setting(
        "torch.__future__.set_swap_module_params_on_conversion",
        future.get_swap_module_params_on_conversion,
        future.set_swap_module_params_on_conversion,
    ),
    Setting("torch.set_printoptions", get_printoptions, lambda value: torch.set_printoptions(**value)),
    Setting("socket.setdefaulttimeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    Setting("numpy.set_printoptions", np.get_printoptions, lambda value: np.set_printoptions(**value)),
    Setting("locale.setlocale", lambda: locale.setlocale(locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    # A context is not equal to a copy of it; its arguments are.
    Setting(
        "decimal.setcontext",
        lambda: decimal.getcontext().__reduce__()[1],
        lambda value: decimal.setcontext(decimal.Context(*value)),
    ),
    Setting("tempfile.tempdir", lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value)),
    Setting("sys.set_int_max_str_digits", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    Setting("gc.disable", gc.isenabled, lambda value: (gc.enable if value else gc.disable)()),
    Setting("gc.set_threshold", gc.get_threshold, lambda value: gc.set_threshold(*value)),
    Setting("sys.setrecursionlimit", sys.getrecursionlimit, sys.setrecursionlimit),
    _options(
        "pandas.set_option", "pandas", _pandas_now, _pandas_defaults, lambda own, *option: own.set_option(*option)
    ),
    _options(
        "sklearn.set_config",
        "sklearn",
        lambda own: own.get_config(),
        lambda own: own._config._global_config,
        lambda own, key, value: own.set_config(**{key: value}),
    ),
    _options(
        "matplotlib.rcParams",
        "matplotlib",
        lambda own: dict(dict.items(own.rcParams)),  # reading the backend's value by its key would choose a backend
        lambda own: dict(dict.items(own.rcParamsDefault)),
        lambda own, *option: own.rcParams.__setitem__(*option),
    ),
    _options(
        "torch.compiler.set_stance",
        "torch._dynamo.eval_frame",
        lambda own: {"stance": own._stance.stance},
        lambda _: {"stance": "default"},
        lambda _, __, value: torch.compiler.set_stance(value),
    ),
    _config("torch._dynamo.config"),
    _config("torch._inductor.config"),
    _config("torch._functorch.config"),
]
