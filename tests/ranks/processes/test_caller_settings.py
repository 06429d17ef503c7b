"""What a script sets for its process holds in ranks and in their loaders' workers, and stays as it is in the caller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.programs import run_script

SCRIPT = """
import decimal, gc, json, locale, logging, multiprocessing, os, socket, sys, tempfile, warnings
import numpy as np
import pandas as pd
import sklearn
import torch
import torch._functorch.config
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from trainloop import AbstractCallback, TrainLoop, TTBasicModel

log = logging.getLogger("my.project")

class OwnWarning(UserWarning):
    pass

class OwnLogger(logging.Logger):
    pass

def readings():
    b = torch.backends
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": [b.cudnn.enabled, b.cudnn.benchmark, b.cudnn.deterministic, b.cudnn.allow_tf32],
        "mkldnn": [b.mkldnn.enabled, b.mkldnn.deterministic],
        "sdp": [b.cuda.flash_sdp_enabled(), b.cuda.mem_efficient_sdp_enabled(), b.cuda.math_sdp_enabled()],
        "fastpath": b.mha.get_fastpath_enabled(),
        "dtype": str(torch.get_default_dtype()), "new": str(torch.ones(1).dtype),
        "anomaly": [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "warn always": torch.is_warn_always_enabled(),
        "flush": bool((torch.tensor([1e-310], dtype=torch.float64) * 1).item() == 0),
        "log levels": [logging.getLogger(name).level for name in (None, "my", "my.project", "quiet")],
        "disabled logs": logging.root.manager.disable,
        "filters": [f[0] for f in warnings.filters if "hush" in str(f[1]) or f[2].__name__ == "OwnWarning"],
        "seterr": np.geterr(),
        "strategy": torch.multiprocessing.get_sharing_strategy(),
        "print": repr(torch.tensor([1 / 3])) + repr(np.array([1 / 3])),
        "start method": multiprocessing.get_start_method(),
        "recursion": sys.getrecursionlimit(),
        "digits": sys.get_int_max_str_digits(),
        "autocast": [str(torch.get_autocast_dtype("cpu")), torch.is_autocast_cache_enabled()],
        "seterrcall": np.geterrcall() is None,
        "sparse": torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        "distributions": torch.distributions.Distribution._validate_args,
        "captured": warnings.showwarning.__module__,
        "logger": logging.getLoggerClass().__name__,
        "temporary": tempfile.gettempdir(),
        "divergence": torch.distributions.kl_divergence(Shifted(0, 1), Shifted(0, 1)),
        "collated": type(default_collate([Sample()])["rows"]).__name__,
        "decimal": str(decimal.Decimal(1) / 3), "locale": locale.setlocale(locale.LC_NUMERIC),
        "torch's printing": torch._tensor_str.get_printoptions(), "sockets": socket.getdefaulttimeout(),
        "donated": torch._functorch.config.donated_buffer,
        "swaps": torch.__future__.get_swap_module_params_on_conversion(),
        "overwrites": torch.__future__.get_overwrite_module_params_on_conversion(),
        "leaves": torch.utils._pytree.tree_leaves(Sample()),
        "sklearn": sklearn.get_config()["assume_finite"], "pandas": pd.get_option("display.precision"),
        "collector": [gc.isenabled(), gc.get_threshold()],
    }

class Shifted(torch.distributions.Normal):
    pass

class Sample:  # a class that default_collate does not know, and that only a registered function makes
    pass

def collate_samples(samples, *, collate_fn_map=None):
    return {"rows": Sample()}

torch.distributions.register_kl(Shifted, Shifted)(lambda p, q: 7)  # that of Normal would be 0
default_collate_fn_map[Sample] = collate_samples
torch.utils._pytree.register_pytree_node(Sample, lambda one: ([3, 4], None), lambda leaves, context: Sample())

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        text = json.dumps(readings()).encode().ljust(2000)
        return torch.ones(4), torch.zeros(()), torch.tensor(list(text), dtype=torch.uint8)

class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.seen = None
    def forward(self, x):
        return self.fc(x)
    def get_loss(self, batch_data, criterion, device):
        x, y, texts = batch_data
        self.seen = json.loads(bytes(texts[0].tolist()))
        return self(x).sum()

class Reads(AbstractCallback):
    def __init__(self, loader):
        super().__init__("reads")
        self.loader = loader
        self.seen = None
    def on_train_begin(self):
        batch = next(iter(self.loader))
        self.seen = [readings(), json.loads(bytes(batch[2][0].tolist()))]
        log.info("beginning")
        log.debug("never")
        warnings.warn("please hush")
        warnings.warn("told", OwnWarning)

def main():
    logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(name)s: %(message)s")
    logging.getLogger("quiet").setLevel(logging.ERROR)
    logging.disable(logging.DEBUG)
    warnings.filterwarnings("ignore", message=".*hush")
    warnings.simplefilter("always", OwnWarning)
    np.seterr(divide="raise", over="ignore")
    b = torch.backends
    b.cudnn.benchmark, b.cudnn.deterministic, b.cudnn.allow_tf32 = True, True, False
    b.mkldnn.enabled = False
    b.cuda.enable_flash_sdp(False)
    b.mha.set_fastpath_enabled(False)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_default_dtype(torch.float64)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.set_warn_always(True)
    torch.set_flush_denormal(True)
    torch.multiprocessing.set_sharing_strategy("file_system")
    sys.setrecursionlimit(3210)
    sys.set_int_max_str_digits(0)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    np.seterrcall(lambda *_: None)
    np.seterr(under="call")
    np.set_printoptions(precision=2)
    torch.sparse.check_sparse_tensor_invariants.enable()
    torch.distributions.Distribution.set_default_validate_args(False)
    logging.setLoggerClass(OwnLogger)
    logging.captureWarnings(True)
    tempfile.tempdir = os.getcwd()
    decimal.getcontext().prec = 4
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
    torch.set_printoptions(precision=7, sci_mode=True)
    socket.setdefaulttimeout(77)
    torch._functorch.config.donated_buffer = not torch._functorch.config.donated_buffer
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    sklearn.set_config(assume_finite=True)
    pd.set_option("display.precision", 9)
    gc.disable()
    gc.set_threshold(5000, 20, 20)
    before = readings()
    model = Net()
    loader, spawning = (DataLoader(Rows(), 4, num_workers=1, multiprocessing_context=c) for c in (None, "spawn"))
    reads = Reads(loader)
    TrainLoop(model, spawning, optimizer=optim.SGD(model.parameters(), 0.1), criterion=None, gpu_mode="ddp",
              accelerator="cpu", devices=2, progress_bar=False).fit(num_iterations=1, callbacks=[reads])
    print("JSON" + json.dumps([before, readings(), *reads.seen, model.seen]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_settings_made_in_main_hold_in_ranks_and_their_workers(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("JSON"))
    before, after, rank, worker, spawned = json.loads(line[4:])
    assert before["dtype"] == "torch.float64"  # the script has set what it says
    assert after == before
    assert rank == before
    assert worker == before
    assert {**spawned, "start method": before["start method"]} == before  # Python hands that one on itself
    # Logs go where the caller's go, in its format: from all ranks warnings, from rank 0 what the level lets through.
    assert done.stderr.count("LOG INFO my.project: beginning") == 1
    assert "never" not in done.stderr
    assert "hush" not in done.stderr
    assert done.stderr.count("OwnWarning: told") == 2
