"""From ``libcudnn.so.9: cannot open shared object file`` to the package to install. Pure: text in, text out."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["missing_library", "package_of", "remedy_for"]

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
_DRIVER = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")
_SYSTEM = {
    "libgomp": "libgomp1",
    "libGL": "libgl1",
    "libglib-2.0": "libglib2.0-0",
    "libstdc++": "libstdc++6",
    "libnuma": "libnuma1",
    "libibverbs": "libibverbs1",
    "libopenblas": "libopenblas0",
    "libmpi": "libopenmpi3",
}
_TORCH = ("libtorch", "libc10", "libshm")


def missing_library(message: str) -> str | None:
    """The file named by a loader's message, ``libcudnn.so.9``; ``None`` for another message."""
    found = re.search(
        r"(lib[\w+.-]*?\.so(?:\.\d+)*): (?:cannot open shared object|undefined symbol|version `)", message
    )
    if found is None:  # torch's own words, where it preloads NVIDIA's packages
        found = re.search(r"(lib[\w+-]+\.so[\w.*\[\]-]*) not found in the system path", message)
    return None if found is None else found[1]


def package_of(library: str, requirements: Sequence[str] = ()) -> str | None:
    """The source of a library: a requirement for pip, ``apt:NAME``, ``driver``, or ``torch``; ``None`` if unknown.

    Parameters
    ----------
    library : str
        ``libcudnn.so.9``.
    requirements : sequence of str
        The installed torch's requirements, which tell the suffix and version.
    """
    stem = library.partition(".so")[0]
    if stem.startswith("libcudnn_"):  # libcudnn_ops.so.9 and others are parts of one package
        stem = "libcudnn"
    if stem in _NVIDIA:
        base = _NVIDIA[stem]
        for requirement in requirements:
            name = re.split(r"[\s;=<>!~(\[]", requirement.strip(), maxsplit=1)[0]
            if re.fullmatch(rf"{base}(-cu\d+)?", name):
                return requirement.partition(";")[0].replace(" ", "").replace("(", "").replace(")", "")
        return f"{base}{_suffix(stem, library)}"
    if stem in _DRIVER:
        return "driver"
    if stem.startswith(_TORCH):
        return "torch"
    return f"apt:{_SYSTEM[stem]}" if stem in _SYSTEM else None


def _suffix(stem: str, library: str) -> str:
    """The suffix if torch doesn't tell: the runtime and cuBLAS have CUDA's number; from 13 on there is none."""
    number = re.search(r"\.so\.(\d+)", library)
    if stem in ("libcudart", "libcublas", "libcublasLt", "libnvrtc", "libnvJitLink", "libcupti") and number:
        return "" if int(number[1]) >= 13 else f"-cu{number[1]}"
    return "-cu12"


def remedy_for(library: str, requirements: Sequence[str] = ()) -> str:
    """Advice, as a sentence, for a library that can't be loaded."""
    package = package_of(library, requirements)
    if package is None:
        return f"find the package that holds {library} (apt-file search {library}), or reinstall what imports it."
    if package == "driver":
        return (
            f"{library} comes with NVIDIA's driver: install it, or start the container with GPUs (docker run --gpus "
            "all); for a machine without GPUs install a CPU build of torch."
        )
    if package == "torch":
        return f"{library} is torch's own, so that installation is broken: pip install --force-reinstall torch."
    if package.startswith("apt:"):
        return f"{library} comes with the system's package {package[4:]}: apt-get install {package[4:]}."
    return (
        f"{library} comes with {re.split('[=<>!~]', package)[0]}: pip install '{package}'. If that is installed, "
        "another copy may come first: look at LD_LIBRARY_PATH."
    )
