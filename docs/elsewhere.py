"""Where the names of PyTorch, Python and NumPy that these pages use are documented.

Sphinx links to other projects by their inventories, which it would fetch at each build. `conf.py` has it read the ones
that this module writes from the tables below, so that a build needs no network and a page that moves breaks none. With
``DOCS_ONLINE=1`` it takes the projects' own, and then a name that they lack is an error: so the tables are checked.
"""

from __future__ import annotations

import builtins
import inspect
import zlib
from pathlib import Path
from pkgutil import resolve_name

SITES = {
    "torch": "https://docs.pytorch.org/docs/stable/",
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
}

# A page and the names on it. `{}` is the name itself: a page of its own.
PAGES = {
    "torch": {
        "generated/{}.html": """
            torch.Tensor.item torch.Tensor.register_post_accumulate_grad_hook
            torch.compile torch.cuda.device_count torch.cuda.set_device torch.enable_grad torch.get_rng_state
            torch.jit.script torch.jit.trace torch.save
            torch.set_float32_matmul_precision torch.use_deterministic_algorithms
            torch.nn.CrossEntropyLoss torch.nn.DataParallel torch.nn.Module torch.nn.ModuleList torch.nn.NLLLoss
            torch.nn.RNN torch.nn.Sequential
            torch.nn.functional.binary_cross_entropy torch.nn.parallel.DistributedDataParallel
            torch.nn.parameter.Parameter
            torch.optim.AdamW torch.optim.LBFGS torch.optim.Optimizer.add_param_group torch.optim.SparseAdam
            torch.optim.lr_scheduler.LRScheduler torch.optim.lr_scheduler.OneCycleLR
            torch.optim.lr_scheduler.ReduceLROnPlateau torch.optim.lr_scheduler.SequentialLR
            torch.optim.lr_scheduler.StepLR""",
        "generated/torch.nn.Module.html": "torch.nn.Module.eval torch.nn.Module.load_state_dict torch.nn.Module.train",
        "generated/torch.nn.SyncBatchNorm.html": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "amp.html": "torch.autocast torch.cuda.amp.GradScaler",
        "checkpoint.html": "torch.utils.checkpoint.checkpoint",
        "data.html": """
            torch.utils.data.DataLoader torch.utils.data.Dataset torch.utils.data.IterableDataset
            torch.utils.data.Subset torch.utils.data.TensorDataset torch.utils.data.WeightedRandomSampler
            torch.utils.data.distributed.DistributedSampler""",
        "distributed.fsdp.fully_shard.html": """
            torch.distributed.fsdp.CPUOffloadPolicy torch.distributed.fsdp.MixedPrecisionPolicy
            torch.distributed.fsdp.fully_shard""",
        "distributed.html": """
            torch.distributed.ProcessGroup torch.distributed.all_reduce torch.distributed.barrier
            torch.distributed.init_process_group""",
        "distributed.tensor.html": "torch.distributed.tensor.DTensor torch.distributed.tensor.DTensor.full_tensor",
        "notes/serialization.html": "torch.serialization.add_safe_globals",
        "optim.html": "torch.optim.Optimizer",
        "profiler.html": "torch.profiler",
        "tensor_attributes.html": "torch.device torch.dtype",
        "tensors.html": "torch.Tensor",
    },
    "python": {
        "library/collections.abc.html": """
            collections.abc.Callable collections.abc.Collection collections.abc.Iterable collections.abc.Iterator
            collections.abc.Mapping collections.abc.Sequence""",
        "library/datetime.html": "datetime.timedelta",
        "library/exceptions.html": """
            ConnectionError Exception KeyboardInterrupt RuntimeError StopIteration SystemExit TypeError ValueError""",
        "library/fractions.html": "fractions.Fraction",
        "library/functions.html": "bool dict float frozenset int list object set str tuple type",
        "library/functools.html": "functools.partial",
        "library/gc.html": "gc.freeze",
        "library/os.html": "os.PathLike",
        "library/pathlib.html": "pathlib.Path",
        "library/pickle.html": "pickle",
        "library/abc.html": "abc.ABC",
    },
    "numpy": {
        "reference/generated/{}.html": "numpy.dtype numpy.ndarray",
        "reference/random/generator.html": "numpy.random.Generator",
        "reference/arrays.scalars.html": "numpy.float64 numpy.int64",
    },
}

# What annotations call it, or what Python does, and the anchor that its page has.
ALIASES = {
    "torch": {
        "torch.amp.GradScaler": "torch.cuda.amp.GradScaler",
        "torch.amp.grad_scaler.GradScaler": "torch.cuda.amp.GradScaler",
        "torch.distributed.destroy_process_group": "distributed.html#shutdown",
        "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
        "torch.multiprocessing.spawn": "multiprocessing.html#torch.multiprocessing.spawn.spawn",
        "torch.nn.Parameter": "torch.nn.parameter.Parameter",
        "torch.nn.modules.module.Module": "torch.nn.Module",
        "torch.nn.parallel.data_parallel.DataParallel": "torch.nn.DataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
        "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    },
    "python": {},
    "numpy": {"numpy.random._generator.Generator": "numpy.random.Generator"},
}


def addresses(project: str) -> dict[str, str]:
    """Page and anchor of each name, below the project's site."""
    found = {}
    for page, names in PAGES[project].items():
        for name in names.split():
            anchor = f"module-{name}" if kind(name) == "py:module" else name
            found[name] = f"{page.format(name)}#{anchor}"
    return found | {alias: found.get(name, name) for alias, name in ALIASES[project].items()}


def kind(name: str) -> str:
    """What Sphinx calls an object of this kind."""
    value = vars(builtins)[name] if name in vars(builtins) else resolve_name(name)
    if inspect.ismodule(value):
        return "py:module"
    if isinstance(value, type):
        return "py:exception" if issubclass(value, BaseException) else "py:class"
    owner = name.rpartition(".")[0]
    return "py:method" if owner and isinstance(resolve_name(owner), type) else "py:function"


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the inventories into a folder; what ``intersphinx_mapping`` is to be."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, site in SITES.items():
        lines = "".join(f"{name} {kind(name)} 1 {at} -\n" for name, at in sorted(addresses(project).items()))
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        (folder / f"{project}.inv").write_bytes(head.encode() + zlib.compress(lines.encode()))
        mapping[project] = (site, str(folder / f"{project}.inv"))
    return mapping
