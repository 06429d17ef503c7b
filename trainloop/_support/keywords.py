"""Check calls of functions: errors for unknown keywords suggest the right one, even for names from other libraries."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MethodType
from typing import Any, TypeVar, overload

from trainloop.errors import UnknownArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])

# Names that people type, although they are not similar to ours, and the arguments that they mean here. The first
# argument that the function has is suggested. Text after a colon replaces "Did you mean". A name may be in several
# rows.
_ROWS: list[tuple[str, ...]] = [
    # TrainLoop and fit
    ("train_dataloader", "train_loader"),
    ("val_dl eval_loader", "validation_loader"),
    ("test_dataloader test_dataloaders", "test_loader"),
    ("loss loss_fn loss_func loss_function", "criterion"),
    ("optim optimizers opt", "optimizer=, with a MultiOptimizer([...]) for several"),
    ("strategy mode distributed_backend parallel_mode", "gpu_mode='single', 'dp', 'ddp' or 'fsdp'"),
    ("precision amp mixed_precision autocast dtype fp16 bf16", "use_amp=True, 'bf16' or 'fp16'"),
    ("device", "accelerator='cpu' or 'cuda', with devices=[0] for a particular GPU"),
    ("gpus num_processes nproc_per_node nprocs", "devices"),
    ("max_steps num_steps steps max_iterations iterations max_iter", "num_iterations=, which counts batches"),
    ("accumulate_grad_batches gradient_accumulation",
     "grad_accumulation"),
    ("clip_grad_norm max_grad_norm grad_clip", "gradient_clip_norm"),
    ("ckpt_path checkpoint resume resume_from_checkpoint", "resume_from='last' or a path"),
    ("find_unused_parameters", "ddp_model_args={'find_unused_parameters': True}"),
    ("check_val_every_n_epoch validation_freq eval_every", "end_auto_eval=, the epochs between evaluations"),
    ("enable_progress_bar verbose", "progress_bar=True or False"),
    ("random_seed seed_everything random_state", "seed"),
    ("gradient_checkpointing activation_checkpointing", "checkpoint_modules"),
    ("lr learning_rate", "optimizer: an argument of the optimizer, torch.optim.Adam(model.parameters(), lr=...)."),
    ("batch_size shuffle num_workers", "train_loader: an argument of the loader, DataLoader(data, batch_size=...)."),
    # callbacks
    ("metric metric_name quantity metric_to_monitor score_name key", "monitor", "metric_names"),
    ("save_top_k max_to_keep n_saved save_total_limit top_k", "keep"),
    ("filepath path dirname dir directory folder checkpoint_dir save_dir output_dir save_path root_dir",
     "dirpath", "log_dir", "path"),
    ("tensorboard_dir", "log_dir"),
    ("save_steps step_interval every_n_batches", "every_n_steps"),
    ("period save_freq epoch_interval check_every", "every_n_epochs"),
    ("train_time_interval", "every_n_minutes"),
    ("min_change threshold_delta", "min_delta"),
    ("wait tolerance early_stopping_patience", "patience"),
    ("direction goal objective", "mode='min' or 'max'"),
    ("log_interval log_freq update_freq logging_steps", "log_every_n_steps", "every_n_steps"),
    ("log_graph", "graph_input"),
    ("config params", "hyperparameters"),
    ("beta momentum alpha", "decay"),
    ("clip_norm gradient_clip_val", "max_norm"),
    ("gradient_clip_value", "max_value"),
    ("duration max_time timeout time_limit max_seconds", "seconds", "time_limit_s"),
    ("swa_epoch_start", "start"),
    ("logging_interval", "every_n_steps"),
    ("step_size_up step_on", "interval"),
    ("labels display_labels", "class_names"),
    ("save_last", "keep: the newest checkpoint is always kept."),
    ("filename", "keep: files are named by epoch and step; .best_path and .last_path are the best and the newest."),
    ("save_weights_only",
     "keep: torch.save(model.state_dict(), path) after fit does that, and so does safetensors=True."),
    ("save_best_only", "keep: monitor=..., with every_n_epochs=None and keep=1, writes only the best."),
    ("restore_best_weights",
     "patience: ModelCheckpoint(dirpath, monitor=...) keeps the best weights; call its load_best() after fit."),
    ("stopping_threshold baseline", "patience: ThresholdEarlyStopping ends training at a value."),
    ("verbose", "patience: the callback that ended the training is always printed."),
    # done by a callback here
    ("logger loggers log_dir tensorboard", "callbacks=[TensorBoard()]"),
    ("log_every_n_steps", "callbacks=[TensorBoard(log_every_n_steps=...)]"),
    ("default_root_dir save_dir output_dir enable_checkpointing checkpoint_dir",
     "callbacks=[ModelCheckpoint(dirpath)]"),
    ("scheduler schedulers lr_scheduler", "callbacks=[LRScheduler(...)]",
     "fit_args: a trial trains to its end; fit_args={'callbacks': [EarlyStopping(...)]} ends it sooner."),
    ("pruner", "fit_args: a trial trains to its end; fit_args={'callbacks': [EarlyStopping(...)]} ends it sooner."),
    ("early_stopping patience", "callbacks=[EarlyStopping(...)]"),
    ("max_time", "callbacks=[TimeLimit(...)]"),
    # tune, plan and ResourceQuota
    ("func fun train_fn trainable model_fn make_model", "make_loop"),
    ("search_space param_grid param_distributions params parameters grid", "space"),
    ("n_iter", "num_trials"),
    ("sampler algo strategy", "searcher"),
    ("cv splitter splits", "folds=, or num_bag_folds=5", "num_bag_folds"),
    ("n_folds n_splits k_folds folds", "num_bag_folds"),
    ("num_rows n_rows rows labels y stratify", "targets=, a target for each row"),
    ("x dataset", "data=(x, y)"),
    ("resources run per_run", "total"),
    ("resources_per_trial per_trial trial", "per_bag=, or per_model= without bagging"),
    ("fold model", "per_model"),
    ("num_cpus num_gpus", "per_model=ResourceQuota(...), or total= for all models together"),
    ("n_jobs max_concurrent_trials num_workers", "per_model=: as many models train at once as fit into total="),
    ("monitor score scoring", "metric"),
    ("local_dir path folder output_dir dirpath save_dir", "storage"),
    ("num_epochs epochs max_epochs callbacks num_iterations grad_accumulation", "fit_args={...}, which fit gets"),
    ("verbose", "progress"),
    ("validation_data val_data valid_data", "tuning_data"),
    ("cpu cores num_threads threads", "num_cpus"),
    ("gpu devices", "num_gpus"),
    ("mem ram memory_limit mem_gb memory_gb", "memory='16GB'"),
    # the wrappers, and their arguments in fit
    ("default_model_methods transfer_model_attributes",
     "module: every attribute and method of the model is reachable through the wrapper, so none has to be named."),
    ("device device_id gpus gpu gpu_ids local_rank rank", "device_ids=, a list"),
    ("replicas_count num_replicas num_devices", "devices"),
    ("auto_wrap_policy wrap_policy wrap wrap_cls units", "shard=[Block], the classes of blocks"),
    ("sharding_strategy", "reshard_after_forward=, and replicas= for several sharded copies"),
    ("mixed_precision", "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(...)"),
    ("cpu_offload", "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()"),
    ("device_mesh", "mesh"),
]  # fmt: skip

_MEANT: dict[str, list[str]] = {}
for _names, *_here in _ROWS:
    for _name in _names.split():
        _MEANT.setdefault(_name, []).extend(_here)


def table_of(foreign: Mapping[str, str]) -> dict[str, str]:
    """Return a table in which every key with several names is split into one key per name."""
    return {name: here for names, here in foreign.items() for name in names.split()}


# Attributes of other libraries' loops, and their equivalents in TrainLoop.
ATTRIBUTES = {
    "test": "evaluate(loop.test_loader) and predict_on_test_set()",
    "validate eval": "evaluate(loop.validation_loader) and predict_on_validation_set()",
    "train run start": "fit(num_epochs=...)",
    "predict": "predict_with_model(loader)",
    "save save_model": "torch.save(loop.model.state_dict(), path), or fit(callbacks=[ModelCheckpoint(dir)])",
    "save_checkpoint": "fit(callbacks=[ModelCheckpoint(dir)])",
    "load load_model": "loop.model.load_state_dict(torch.load(path))",
    "load_checkpoint load_from_checkpoint resume": "fit(resume_from='last' or a path)",
    "current_epoch": "epoch",
    "total_steps steps iteration num_steps": "global_step",
    "logged_metrics callback_metrics metrics train_history": "history",
    "val_loader val_dataloader valid_loader val_dataloaders": "validation_loader",
    "train_dataloader train_dataloaders": "train_loader",
    "test_dataloader test_dataloaders": "test_loader",
    "optimizers": "optimizer",
    "should_stop stop stop_training": "early_stop = True",
    "stop_reason": "ends",
    "strategy mode": "gpu_mode",
    "global_rank": "rank",
    "num_devices": "run_config.devices",
    "logger add_callback": "fit(callbacks=[...])",
    "lr_find lr_finder": "find_lr()",
    "scale_batch_size": "find_batch_size()",
    "state_dict": "checkpoint_state() in a callback, or a ModelCheckpoint",
}

# Attributes of other libraries' models and callbacks.
MODEL_ATTRIBUTES = {
    "trainer current_epoch global_step": "self.train_loop_obj in a callback, which has epoch and global_step, and may "
    "set attributes of the model in on_batch_begin",
    "log_dict": "self.log(name, value) for each entry",
    "logger": "self.log(name, value), and fit(callbacks=[TensorBoard()])",
    "hparams save_hyperparameters": "attributes of your own, and TensorBoard(hyperparameters={...})",
    "optimizers manual_backward toggle_optimizer lr_schedulers": "a get_loss that yields its losses one by one, with a "
    "MultiOptimizer",
}
CALLBACK_ATTRIBUTES = {
    "trainer pl_module learner state": "self.train_loop_obj",
    "model module": "self.train_loop_obj.model",
    "optimizer optimizers": "self.train_loop_obj.optimizer",
    "epoch current_epoch": "self.train_loop_obj.epoch",
    "global_step": "self.train_loop_obj.global_step",
    "history logs": "self.train_loop_obj.history",
}

LOG_KEYWORDS = table_of(
    {
        "logger": "Leave it out: loggers are callbacks here, as in fit(callbacks=[TensorBoard()]), and get all values.",
        "reduce_fx reduction": "Pass reduce='mean', 'sum', 'min' or 'max'.",
        "step global_step": "Leave it out: a value belongs to the step in which it is logged.",
        "sync_dist_group add_dataloader_idx metric_attribute": "Leave it out: there is no such setting here.",
    }
)

_ATTRIBUTE = table_of(ATTRIBUTES)
_OF_MODELS, _OF_CALLBACKS = table_of(MODEL_ATTRIBUTES), table_of(CALLBACK_ATTRIBUTES)


def attribute_hint(name: str, table: Mapping[str, str] = _ATTRIBUTE) -> str:
    """Return a sentence that names the replacement of another library's attribute; an empty string if unknown."""
    here = table.get(name)
    return "" if here is None else f". The equivalent here is {here}"


def explain_attribute(error: AttributeError, model: Any, callbacks: Sequence[Any]) -> None:
    """If a model or a callback lacks an attribute of another library's, add the equivalent to the error's text."""
    operator = re.search(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'", str(error))
    if operator is not None:
        error.args = (
            f"{error}. If the script defines the operator {operator[1]}::{operator[2]}, define it in a module that the "
            "script imports: ranks don't run the script.",
        )
        return
    # In dp, an error of a replica's thread is raised again, with its text only.
    found = re.search(r"'(\w+)' object has no attribute '(\w+)'\s*$", str(error))
    if found is None:
        return
    tables = {**{type(callback).__name__: _OF_CALLBACKS for callback in callbacks}, type(model).__name__: _OF_MODELS}
    hint = attribute_hint(found[2], tables.get(found[1], {}))
    if hint:
        error.args = (f"{str(error).rstrip()}{hint}.",)


def explain_log(error: TypeError) -> None:
    """If ``log`` got a keyword of another library's, add what to do instead to the error's text."""
    found = re.search(r"(.*\.log\(\) got an unexpected keyword argument '(\w+)')", str(error))
    here = found and LOG_KEYWORDS.get(found[2])
    if found and here:  # in place of the guess that Python 3.13 adds
        error.args = (f"{found[1]}. {here}",)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar known name if its similarity is at least ``cutoff`` (1 means equal), else ``None``."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def hint(name: str, own: Sequence[str], others: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the end of a message about an unknown keyword.

    Parameters
    ----------
    name : str
        The keyword.
    own : sequence of str
        Arguments of the function that got the keyword.
    others : mapping of str to sequence of str, optional
        Other functions that the user may have meant, with their arguments.
    """
    others = others or {}
    for function, arguments in others.items():
        if name in arguments:
            return f": it belongs to {function}({name}=...)."
    for here in _MEANT.get(name.lower(), ()):
        argument, sign, text = re.fullmatch(r"(\w+)([:=]?)(.*)", here).groups()  # type: ignore[union-attr]
        if argument in own:
            return f":{text}" if sign == ":" else f". Did you mean {argument}={text}?"
        for function, arguments in others.items():
            if argument in arguments:
                return f":{text}" if sign == ":" else f". Did you mean {function}({argument}={text or '...'})?"
    for function, arguments in {"": own, **others}.items():
        close = nearest(name.lower(), arguments)
        if close is not None:
            return f". Did you mean {function}({close}=...)?" if function else f". Did you mean {close}=?"
    return f". Its arguments: {', '.join(own)}." if own else ". It has no arguments."


def refuse(
    function: str, given: Iterable[str], own: Sequence[str], others: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Raise for unknown keywords of a function, each with a :func:`hint`.

    Raises
    ------
    UnknownArgumentError
        If one of ``given`` is not in ``own``.
    """
    messages = [
        f"{function}() got an unexpected keyword argument {name!r}{hint(name, own, others)}"
        for name in given
        if name not in own
    ]
    if messages:
        raise UnknownArgumentError("\n".join(messages))


def _arguments_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def why_not(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return why a function can't be called with these arguments; empty if it can, or if its signature is unknown."""
    if isinstance(function, MethodType):  # one that is defined without self has no signature
        args, function = (function.__self__, *args), function.__func__
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def unwrapped(function: Any) -> Any:
    """Return the function within partials; any other object unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """Return the name of a function, also within partials; of another object that can be called, that of its class.

    Examples
    --------
    >>> name_of(functools.partial(max, default=0)), name_of(object())
    ('max', 'object')
    """
    inner = unwrapped(function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def keywords_of(kind: type) -> list[str]:
    """Return the keywords of a class, including keywords that it passes to its bases as ``**kwargs``."""
    known: dict[str, None] = {}
    for cls in kind.__mro__[:-1]:
        if "__init__" in vars(cls):
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
            known |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(known)


@overload
def refuses_unknown(function: Function) -> Function: ...


@overload
def refuses_unknown(*, others: Callable[[], Mapping[str, Callable[..., Any]]]) -> Callable[[Function], Function]: ...


def refuses_unknown(
    function: Function | None = None, *, others: Callable[[], Mapping[str, Callable[..., Any]]] = dict
) -> Any:
    """Decorate a function so that an unknown keyword raises an error with a hint, before the function runs.

    If the function passes its ``**kwargs`` to the constructor of its class's base, their names are known, too.

    Parameters
    ----------
    others : callable
        Returns other functions, by the names that hints use, to which an unknown keyword may belong.
    """
    if function is None:
        return functools.partial(refuses_unknown, others=others)
    own = _arguments_of(function)
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    shown = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        known = keywords_of(type(args[0])) if passes_on else own
        if not kwargs.keys() <= set(known):
            refuse(shown, kwargs, known, {name: _arguments_of(other) for name, other in others().items()})
        return function(*args, **kwargs)

    return checked  # with the same signature
