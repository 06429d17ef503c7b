"""Train on the GPU, or on the CPU if the build of the library can't use a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from trainloop._support.user_line import warn

__all__ = ["gpu_or_cpu"]

T = TypeVar("T")

# Error texts of LightGBM, XGBoost, CatBoost, torch and this package for 'no GPU build' and 'no device'. Compiled only
# when needed: compiling it at import took a tenth of `import trainloop`.
_NO_GPU = r"""
      (gpu|cuda|opencl)[ ]tree[ ]learner[ ]was[ ]not[ ]enabled
    | not[ ]compiled[ ]with[ ](gpu|cuda|opencl)
    | (built|compiled)[ ]without[ ](gpu|cuda|opencl)
    | no[ ](opencl|gpu|cuda)[ ]device
    | no[ ]cuda-capable[ ]device
    | no[ ]cuda[ ]gpus[ ]are[ ]available
    | no[ ](nvidia[ ]driver|gpu[ ]is[ ]visible)
    | task[ ]type[ ]\[gpu\][ ]not[ ]found
    | cuda[ ]driver[ ]version[ ]is[ ]insufficient
    | this[ ]machine[ ]has[ ]no[ ]such[ ]device
"""


def gpu_or_cpu(fit_on_gpu: Callable[[], T], fit_on_cpu: Callable[[], T]) -> T:
    """Train on the GPU. If the library was built without GPU support or finds no device, start again on the CPU.

    Parameters
    ----------
    fit_on_gpu, fit_on_cpu : callable
        Functions that train from the start and return the model.

    Returns
    -------
    object
        The result of the callable that succeeded.

    Raises
    ------
    Exception
        Every error of ``fit_on_cpu``, and every other error of ``fit_on_gpu`` (out of memory, wrong arguments),
        unchanged.

    Warns
    -----
    UserWarning
        Once, with the cause and the remedy, if the CPU is used.

    Examples
    --------
    >>> gpu_or_cpu(  # doctest: +SKIP
    ...     lambda: LGBMClassifier(device="gpu").fit(x, y), lambda: LGBMClassifier(device="cpu").fit(x, y)
    ... )
    """
    try:
        return fit_on_gpu()
    except Exception as error:
        text = str(error)
        if "out of memory" in text.lower() or re.search(_NO_GPU, text, re.IGNORECASE | re.VERBOSE) is None:
            raise
        cause = f"{type(error).__name__}: {' '.join(text.split())[:300]}"
    warn(
        f"Training starts again on the CPU, because no GPU can be used ({cause}). "
        "Install the library's GPU build and check CUDA_VISIBLE_DEVICES, or set the device to the CPU to silence this."
    )
    return fit_on_cpu()
