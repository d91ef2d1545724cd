#!/usr/bin/env bash
# Compile every .cu file with nvcc where both exist; say what is skipped where one does not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t kernels < <(find csrc -name '*.cu' 2>/dev/null | LC_ALL=C sort)
if [ ${#kernels[@]} -eq 0 ]; then
    echo "==> SKIPPED: CUDA compile: csrc/ has no .cu files"
    exit 0
fi
if ! command -v nvcc >/dev/null; then
    echo "==> SKIPPED: CUDA compile of ${kernels[*]}: no nvcc on PATH"
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for kernel in "${kernels[@]}"; do
    echo "==> nvcc -c $kernel"
    nvcc -std=c++17 -Werror all-warnings -I csrc -c "$kernel" -o "$scratch/$(basename "$kernel").o"
done
