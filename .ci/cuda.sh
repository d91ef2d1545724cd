#!/usr/bin/env bash
# Compile the CUDA sources for each GPU generation that nvcc knows, with warnings as errors. Fetch NVIDIA's NCCL once,
# which tests compare with our declarations and open without a GPU. Print what is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

nccl=build/nccl-$(sed -n "s/^nvidia-nccl-cu13==//p" constraints.txt)
if [ ! -e $nccl ]; then
    echo "==> fetching NCCL (300 MB)"
    rm -rf $nccl.part
    if python -m pip download -q --no-deps -c constraints.txt -d $nccl.part nvidia-nccl-cu13; then
        python -m zipfile -e $nccl.part/*.whl $nccl.part
        rm $nccl.part/*.whl
        mv $nccl.part $nccl
    else
        echo "==> SKIPPED: tests with NVIDIA's NCCL: it could not be fetched"
    fi
fi

mapfile -t kernels < <(find csrc -name '*.cu' | LC_ALL=C sort)
# CMake looks there too.
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if ! command -v nvcc >/dev/null; then
    echo "==> SKIPPED: CUDA compile of ${kernels[*]}: no nvcc on PATH"
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
known=$(nvcc --list-gpu-code)
targets=()
for generation in 70 75 80 90 100; do
    if grep -qx "sm_$generation" <<<"$known"; then
        targets+=(-gencode "arch=compute_$generation,code=sm_$generation")
    else
        echo "==> SKIPPED: sm_$generation, unknown to this nvcc"
    fi
done
strict=(-std=c++17 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wconversion,-Wshadow,-Werror -I csrc)
for kernel in "${kernels[@]}" csrc/device/cuda_*.cc; do
    echo "==> nvcc ${targets[*]} -c $kernel"
    nvcc "${strict[@]}" "${targets[@]}" -c "$kernel" -o "$scratch/$(basename "$kernel").o"
done
