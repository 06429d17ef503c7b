"""The simulated device inside of torch: CPU kernels under the CUDA dispatch key, and what the runtime has counted."""

import contextlib
import ctypes
import os
import sys

_RUNTIME = ctypes.CDLL("libcudart.so.13")
_RUNTIME.fakecuda_counter.restype = _RUNTIME.fakecuda_set_lag_us.restype = ctypes.c_long
_COUNTERS = {"synchronisations": 0, "streams": 1, "pinned allocations": 2, "kernels": 3, "to device": 4, "to host": 5}


_KEPT = []


def count(what: str = "synchronisations") -> int:
    """How many of them this process has made."""
    return _RUNTIME.fakecuda_counter(_COUNTERS[what])


@contextlib.contextmanager
def lag(seconds):
    """What side streams are given in this context begins that late, or as soon as somebody waits for it."""
    before = _RUNTIME.fakecuda_set_lag_us(ctypes.c_long(int(seconds * 1e6)))
    try:
        yield
    finally:
        _RUNTIME.fakecuda_set_lag_us(ctypes.c_long(before))


def install() -> int:
    """Put the CPU's kernels in the place of the device's; gives their number."""
    import torch

    sys.path.insert(0, os.environ["FAKECUDA_BUILD"])
    try:
        import fakeops
    finally:
        sys.path.pop(0)
    number = fakeops.install()
    # Kernels of these libraries would be launched on a device that computes nothing.
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    _install_sync_batchnorm(torch)
    return number


def _install_sync_batchnorm(torch):
    """What torch.nn.SyncBatchNorm calls on a GPU has no CPU kernels; by the formulas of torch's Normalization.cuh."""
    import warnings

    def per_channel(t, like):
        return t.reshape(1, -1, *[1] * (like.dim() - 2))

    def others(t):
        return [axis for axis in range(t.dim()) if axis != 1]

    def wide(t):
        return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t

    def stats(input, eps):
        x = wide(input)
        return x.mean(others(x)), (x.var(others(x), correction=0) + eps).rsqrt()

    def gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
        counts = counts.reshape(-1, 1).to(mean.dtype)
        total = counts.sum()
        whole = (mean * counts).sum(0) / total
        squares = ((invstd**-2 - eps) * counts + counts * (mean - whole) ** 2).sum(0)
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(whole * momentum)
        if running_var is not None:
            running_var.mul_(1 - momentum).add_(squares / (total - 1) * momentum)
        return whole, (squares / total + eps).rsqrt()

    def elementwise(input, weight, bias, mean, invstd, eps):
        x = (wide(input) - per_channel(mean, input)) * per_channel(invstd, input)
        if weight is not None:
            x = x * per_channel(weight, input)
        return (x if bias is None else x + per_channel(bias, input)).to(input.dtype)

    def backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
        grad, x = wide(grad_out), wide(input)
        sum_dy = grad.sum(others(x))
        sum_dy_xmu = (grad * (x - per_channel(mean, x))).sum(others(x))
        like = weight if weight is not None else sum_dy
        return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(like.dtype), sum_dy.to(like.dtype)

    def backward_elementwise(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
        grad, x, total = wide(grad_out), wide(input), count.sum()
        part = grad - per_channel(sum_dy / total, x)
        part = part - (x - per_channel(mean, x)) * per_channel(invstd**2 * sum_dy_xmu / total, x)
        factor = invstd if weight is None else invstd * weight
        return (part * per_channel(factor, x)).to(input.dtype)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # 'overriding a previously registered kernel'
        for name, function in {
            "batch_norm_stats": stats,
            "batch_norm_gather_stats_with_counts": gather_stats,
            "batch_norm_elemt": elementwise,
            "batch_norm_backward_reduce": backward_reduce,
            "batch_norm_backward_elemt": backward_elementwise,
        }.items():
            library.impl(name, function, "CUDA")
    _KEPT.append(library)
