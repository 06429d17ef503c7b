#!/usr/bin/env bash
# build.sh PYTHON FOLDER: build the simulated CUDA into a folder. A minute; most of it is one file.
# PYTHON: of an environment with PyPI's torch 2.13 (for CUDA 13) and its nvidia packages, nvidia-cuda-crt and -cccl too
set -euo pipefail
cd "$(dirname "$0")"
PY=${1:?python of an environment with the CUDA build of torch}
OUT=${2:?where to}
mkdir -p "$OUT"
SP=$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
INC=$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
CU=$SP/nvidia/cu13/include
CUDA=(-I"$CU" -I"$CU/cccl")
gcc -c -fPIC -O1 stubs.c -o "$OUT/stubs.o"
g++ -std=c++17 -O1 -g -fPIC -shared "${CUDA[@]}" cudart.cpp "$OUT/stubs.o" -o "$OUT/libcudart.so.13" \
  -Wl,-soname,libcudart.so.13 -Wl,--version-script=ver.map -lpthread
gcc -w -shared -fPIC -O1 cuda_driver.c -o "$OUT/libcuda.so.1" -Wl,-soname,libcuda.so.1
gcc -w -c -fPIC -O1 nccl_stubs.c -o "$OUT/nccl_stubs.o"
g++ -std=c++17 -O1 -w -fPIC -shared "${CUDA[@]}" -I"$SP/nvidia/nccl/include" nccl.cpp "$OUT/nccl_stubs.o" \
  -o "$OUT/libnccl.so.2" -Wl,-soname,libnccl.so.2 -lpthread
[[ $OUT/fakeops.so -nt fakeops.cpp ]] && touch "$OUT/fakeops.so" && exit
g++ -std=c++20 -O0 -w -fPIC -shared -D_GLIBCXX_USE_CXX11_ABI=1 -I"$SP/torch/include" \
  -I"$SP/torch/include/torch/csrc/api/include" "${CUDA[@]}" -I"$INC" fakeops.cpp -o "$OUT/fakeops.so" \
  -L"$SP/torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda -ltorch
