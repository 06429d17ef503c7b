"""Find the package to install after ``libcudnn.so.9: cannot open shared object file``."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["missing_library", "remedy_for"]

# Names of NVIDIA's packages on PyPI without their suffix, by the libraries in them.
_NVIDIA = {
    "libcudnn": "nvidia-cudnn",
    "libcudart": "nvidia-cuda-runtime",
    "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas",
    "libcufft": "nvidia-cufft",
    "libcufile": "nvidia-cufile",
    "libcurand": "nvidia-curand",
    "libcusolver": "nvidia-cusolver",
    "libcusparse": "nvidia-cusparse",
    "libcusparseLt": "nvidia-cusparselt",
    "libcupti": "nvidia-cuda-cupti",
    "libnccl": "nvidia-nccl",
    "libnvJitLink": "nvidia-nvjitlink",
    "libnvrtc": "nvidia-cuda-nvrtc",
    "libnvToolsExt": "nvidia-nvtx",
    "libnvshmem_host": "nvidia-nvshmem",
}


def missing_library(message: str) -> str | None:
    """Return the file that a loader's message names, such as ``libcudnn.so.9``; ``None`` for other messages."""
    found = re.search(
        r"(lib[\w+.-]*?\.so(?:\.\d+)*): (?:cannot open shared object|undefined symbol|version `)", message
    )
    if found is None:  # torch's own message, when it preloads NVIDIA's packages
        found = re.search(r"(lib[\w+-]+\.so[\w.*\[\]-]*) not found in the system path", message)
    return None if found is None else found[1]


def remedy_for(library: str, requirements: Sequence[str] = ()) -> str:
    """Return advice for a library that can't be loaded.

    Parameters
    ----------
    library : str
        Name of the file, such as ``libcudnn.so.9``.
    requirements : sequence of str
        Requirements of the installed torch, which have the package's suffix and version.
    """
    stem = library.partition(".so")[0]
    if stem.startswith("libcudnn_"):  # libcudnn_ops.so.9 and others are parts of one package
        stem = "libcudnn"
    if stem in ("libcuda", "libnvidia-ml"):
        return (
            f"{library} is part of NVIDIA's driver: install it, or start the container with GPUs (docker run --gpus "
            "all); on a machine without GPUs install a CPU build of torch."
        )
    package = _NVIDIA.get(stem)
    if package is None:
        return f"find the package that contains {library} (apt-file search {library}), or reinstall its importer."
    for requirement in requirements:
        name = re.split(r"[\s;=<>!~(\[]", requirement.strip(), maxsplit=1)[0]
        if re.fullmatch(rf"{package}(-cu\d+)?", name):
            package = requirement.partition(";")[0].replace(" ", "").replace("(", "").replace(")", "")
            break
    else:
        package = f"{package}-cu12"
    return (
        f"pip install '{package}', which contains {library}. If it is installed, another copy may be found first: "
        "check LD_LIBRARY_PATH."
    )
