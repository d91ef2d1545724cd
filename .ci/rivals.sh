#!/usr/bin/env bash
# Set up a venv for Keras on JAX and Keras on PyTorch, which `hvpipe bench` measures beside hvpipe:
# rivals.sh VENV CONSTRAINTS [PYTHON]. A second run does nothing.
#
# CONSTRAINTS has the versions of Keras, NumPy and others with which hvpipe is tested. PyPI's PyTorch for x86-64 brings
# CUDA (3 GB), which it does not use here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1 constraints=$2 python=${3:-python3} own=.ci/rivals-requirements.txt
stamp=$venv/.stamps/rivals-$(cat "$own" "$constraints" | cksum | tr ' ' '-')
if [ -f "$stamp" ]; then
    echo "==> JAX and PyTorch are set up"
    exit 0
fi
rm -rf "$venv"
echo "==> making $venv with JAX and PyTorch"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$own" -c "$constraints" keras numpy psutil scikit-learn
mkdir -p "$venv/.stamps"
touch "$stamp"
