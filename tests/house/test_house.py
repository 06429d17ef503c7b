"""The frames and files of one step, counted; imports in no circle, at the head of their file; private names at home."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from test_layers import nodes_that_run, tree_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainloop
from trainloop import TrainLoop, TTModel

PACKAGE = Path(trainloop.__file__).parent


# -- one step, traced --------------------------------------------------------------------------------------------------


def is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE))


def holds(value: Any, batch: Any) -> bool:
    """Whether a value is the batch, or has it among its parts."""
    return value is batch or (isinstance(value, (tuple, list)) and any(holds(part, batch) for part in value))


class Tracer:
    """Own functions that are called from one ``get_loss`` to the next, and the files in which one has the batch."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = [[]]
        self.values: list[tuple[str, list[Any]]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or not is_own(frame):
            return
        if event == "call" and not frame.f_code.co_name.startswith("<"):  # Python 3.12 has no frame for a list's loop
            self.steps[-1].append(frame.f_code.co_name)
        self.values.append((frame.f_code.co_filename, [arg, *frame.f_locals.values()]))

    def files_with(self, batch: Any) -> set[str]:
        return {Path(file).name for file, values in self.values if any(holds(value, batch) for value in values)}


class Net(TTModel):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.tracer = tracer
        self.stacks: list[list[str]] = []
        self.batches: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        sys.setprofile(None)
        x, y = batch_data
        frame: FrameType | None = sys._getframe(1)
        stack = []
        while frame is not None:
            if is_own(frame):
                stack.append(frame.f_code.co_name)
            frame = frame.f_back
        self.stacks.append(stack)
        self.batches.append(x)
        self.tracer.steps.append([])
        loss: Tensor = criterion(self(x), y)
        sys.setprofile(self.tracer)
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        raise NotImplementedError


class Rows(TensorDataset):
    """Read a batch at a time as any other dataset is: by the loader, not by its tensors."""


def test_one_step_is_short() -> None:
    for kind in (TensorDataset, Rows):
        tracer = Tracer()
        model = Net(tracer)
        data = kind(torch.randn(40, 4), torch.randint(2, (40,)))
        loop = TrainLoop(
            model,
            DataLoader(data, batch_size=8, shuffle=True),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            accelerator="cpu",
            progress_bar=False,
        )
        gc.disable()  # what garbage of other tests calls is no part of a step
        sys.setprofile(tracer)
        try:
            loop.fit(num_epochs=1)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert len(model.batches) == 5
        # Above fit is only the decorator that explains unknown keywords.
        assert all(stack.index("fit") < 4 and stack[4:] in ([], ["checked"]) for stack in model.stacks), model.stacks
        whole_steps = tracer.steps[2:-1]  # from a get_loss to the next one; the first imports and allocates
        assert all("forward_backward" in step and len(step) <= 24 for step in whole_steps), whole_steps
        for batch in model.batches:
            assert 2 <= len(tracer.files_with(batch)) <= 5, tracer.files_with(batch)


# -- imports -----------------------------------------------------------------------------------------------------------

FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(module: str, node: ast.AST) -> Iterator[str]:
    """Modules of this package that one statement imports."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        found = [name if name in FILES else node.module for name in inner]
    else:
        return
    yield from (name for name in found if name in FILES and name != module)


def at_head(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when a module is imported."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def test_imports_go_in_no_circle() -> None:
    edges = {
        module: {name for node in at_head(tree_of(path)) for name in imported(module, node)}
        for module, path in FILES.items()
    }
    assert sum(map(len, edges.values())) > 100
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(edges[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


# Own modules that are imported inside functions, and why.
UP = "a way up, taken when it is called"
LATE = {
    "trainloop.__main__ trainloop.checkpoint.export": "the doctor works where torch does not",
    "trainloop.__main__ trainloop.resources.quota": "the doctor works where torch does not",
    "trainloop.train_loop.loop trainloop.tools": UP,
    "trainloop.train_loop.loop trainloop.tools.preflight": UP,
    "trainloop.train_loop.loop trainloop.tools.replay": UP,
    "trainloop.train_loop.run.placement trainloop.train_loop.run.fsdp_placement": "a placement that builds on it",
    "trainloop._transfer.unpicklable trainloop._transfer.payload": UP,
}


def test_own_modules_are_imported_at_the_head_of_a_file() -> None:
    late = set()
    for module, path in FILES.items():
        tree = tree_of(path)
        head = {id(node) for node in at_head(tree)}
        late |= {
            f"{module} {n}" for node in nodes_that_run(tree) if id(node) not in head for n in imported(module, node)
        }
    assert late == set(LATE), f"new: {sorted(late - set(LATE))}; gone: {sorted(set(LATE) - late)}"


# -- private names -----------------------------------------------------------------------------------------------------

# Their documentation names them.
DOCUMENTED = set("_make _replace _asdict _fields _exit _getframe _current_frames _parameters _buffers _modules".split())
DOCUMENTED |= {"_values", "_indices", "_nnz"}  # of sparse tensors
# What a node of autograd's graph has saved: torch's notes on "Autograd mechanics".
DOCUMENTED |= set("_saved_ignore_index _saved_reduction _saved_target _saved_total_weight _saved_weight".split())
DOCUMENTED.add("_raw_saved_total_weight")

# Files that use private names of torch, the standard library and others. Each is to stand in one place, with the
# reason and with what happens when it goes away; another name, or another file, needs its row here.
FOREIGN: dict[str, str] = {
    "callbacks/watch/failure_recorder.py": "_version",
    "distributed/ranks.py": "_get_backend",
    "callbacks/weights/gradient.py": "_foreach_norm",
    "checkpoint/sharded_writing.py": "_StorageInfo",
    "data/batch/stops.py": "_IterableDatasetFetcher _MapDatasetFetcher",
    "data/stream/streams.py": "_worker_info",
    "data/loader/loader_copies.py": "_iterator _shutdown_workers",
    "train_loop/execution/handover.py": "_non_persistent_buffers_set",
    "_launch/rank_process.py": "_run_exitfuncs _shutdown",
    "_launch/script/settings.py": (
        "_KL_REGISTRY _validate_args _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks "
        "_global_forward_hooks_always_called _global_forward_hooks_with_kwargs _global_forward_pre_hooks "
        "_global_is_full_backward_hook _global_optimizer_post_hooks _global_optimizer_pre_hooks _pytree "
        "_get_root _global_config _registered_options _stance"
    ),
    "_processes/server.py": "_registry",
    "optim/optimizers.py": (
        "_global_optimizer_post_hooks _global_optimizer_pre_hooks _opt_called _optimizer_step_post_hooks "
        "_optimizer_step_pre_hooks"
    ),
    "parallel/ddp.py": (
        "_check_reducer_finalized _inside_ddp_forward _push_all_rebuilt_params _remove_autograd_hooks _sync_buffers"
    ),
    "parallel/dp.py": "_former_parameters _replicate_for_data_parallel",
    "parallel/replicas/attributes.py": "_version",
    "parallel/sharded/misuse.py": "_engine_run_backward _version",
    "parallel/sharded/undoing.py": (
        "_all_gather_result _composable_state _custom_op_handlers _execution_engine _fsdp_param_group _get_fsdp_state "
        "_unsharded_param _local_scalar_dense _module_state_mapping _muon _op_dispatcher _zeropower_via_newtonschulz "
        "_module_to_pre_load_state_dict_hook_handle _module_to_pre_save_state_dict_hook_handle "
        "_post_forward_hook_handle _post_load_hook_handle _pre_forward_hook_handle _training_state"
    ),
    "_support/blocks.py": (
        "_C _autograd _get_current_dispatch_mode_stack _get_current_function_mode_stack _pop_mode _push_mode "
        "_python_dispatch"
    ),
    "_support/platform.py": "_config",
    "_support/scratch.py": "_rand",
    "parallel/sync_batchnorm.py": "_BatchNorm",
    "train_loop/run/placement.py": "_dynamo",
    "train_loop/run/recompute.py": "_version",
    "train_loop/run/run.py": "_version",
    "train_loop/saving/beside.py": "_forward_hooks _forward_pre_hooks _non_persistent_buffers_set",
    "train_loop/training/gradients.py": "_per_optimizer_states",
    "train_loop/training/trained.py": "_get_default_store",
    "train_loop/training/whole_step.py": "_backward_hooks _dynamo _has_any_global_hook _post_accumulate_grad_hooks",
    "_transfer/classes.py": "_DYNAMIC_CLASS_TRACKER_BY_ID _lookup_class_or_track _value_",
    "_transfer/pickling.py": (
        "_DYNAMIC_CLASS_TRACKER_BY_CLASS _DYNAMIC_CLASS_TRACKER_BY_ID _extra_reducers _GeneratorContextManager "
        "_untyped_storage _utils _validate_loaded_sparse_tensors"
    ),
    "_transfer/torch_objects.py": (
        "_inject_new_class _inject_property _rebuild_tensor_v3 _torchdynamo_orig_callable _utils"
    ),
    "_transfer/unpicklable.py": "_extract_code_globals _should_pickle_by_reference",
}


def own_names(tree: ast.Module) -> set[str]:
    """Private names that a module makes: functions, classes, variables, and attributes of its own objects."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.AST) -> bool:
    """``self``, ``cls`` or ``super()``: a class may use what its base has for it."""
    return ast.unparse(node) in ("self", "cls", "super()")


def test_private_names_stay_at_home() -> None:
    trees = {path.relative_to(PACKAGE).as_posix(): tree_of(path) for path in PACKAGE.rglob("*.py")}
    own = {file: own_names(tree) for file, tree in trees.items()}
    ours = set.union(*own.values())
    neighbours: list[str] = []
    foreign: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                private = {alias.name for alias in node.names if is_private(alias.name)}
                if node.module == "trainloop":  # has packages, of which some are internal
                    continue
                if (node.module or "").startswith("trainloop"):
                    neighbours += [f"{file}:{node.lineno} imports {name} from {node.module}" for name in private]
                    continue
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                inherited = is_self(node.value) and node.attr in ours
                private = set() if inherited else {node.attr} - own[file] - DOCUMENTED
            else:
                continue
            if private:
                foreign.setdefault(file, set()).update(private)
    known = {file: set(names.split()) for file, names in FOREIGN.items()}
    new = {file: names - known.get(file, set()) for file, names in foreign.items()}
    gone = {file: names - foreign.get(file, set()) for file, names in known.items()}
    for file, names in new.items():
        for name in sorted(names & ours):
            homes = ", ".join(sorted(home for home in own if name in own[home]))
            neighbours.append(f"{file} uses {name}, which is private to {homes}")
    assert not neighbours, "make public what a neighbour needs:\n" + "\n".join(neighbours)
    assert not any(new.values()), {file: names for file, names in new.items() if names}
    assert not any(gone.values()), {file: names for file, names in gone.items() if names}


def test_no_class_of_ours_is_recognised_by_its_name() -> None:
    trees = {path.relative_to(PACKAGE).as_posix(): tree_of(path) for path in PACKAGE.rglob("*.py")}
    ours = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    named = [
        f"{file}:{function.lineno} {text.value}"
        for file, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and compares_names(function)
        for text in ast.walk(function)
        if isinstance(text, ast.Constant) and text.value in ours
    ]
    assert not named, "ask with isinstance, or let the class declare it:\n" + "\n".join(named)


def compares_names(function: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Attribute) and part.attr in ("__name__", "__qualname__")
        for node in ast.walk(function)
        if isinstance(node, ast.Compare)
        for part in (node.left, *node.comparators)
    )
