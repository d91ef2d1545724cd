#!/usr/bin/env bash
# Build hvpipe against MPICH, run the suites that tests/test_mpi.py keeps for it, and train: mpich.sh VENV CONSTRAINTS.
# With a third argument, "build", it only builds.
#
# VENV has all packages but MPI. .venv-mpich adds MPICH and the build; build/venv-mpich keeps what was compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/$1 constraints=$PWD/$2 own=$PWD/.venv-mpich log=build/mpich.log

version() { "$1/bin/python" --version 2>/dev/null; }
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [ "$(version "$own")" != "$(version "$venv")" ]; then
    rm -rf "$own"
    echo "==> making $own"
    "$venv/bin/python" -m venv --without-pip "$own"
fi
packages "$venv" >"$(packages "$own")/others.pth" # the editable hvpipe in there is not seen
"$own/bin/python" -m pip install --quiet --no-deps -c "$constraints" mpich
export PATH=$own/bin:$venv/bin:$PATH SKBUILD_BUILD_DIR=build/venv-mpich
unset PYTHONPATH
. .ci/ccache.sh
echo "==> building hvpipe against $("$own/bin/mpichversion" | head -n 1)"
mkdir -p build
"$own/bin/python" -m pip install --no-build-isolation --no-deps -e . >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
[ "${3:-}" != build ] || exit 0
"$own/bin/python" -m pytest -q -m mpich -n 2 tests/test_mpi.py
timeout 300 hvpipe run -np 2 examples/train.py --epochs 2 --progress epoch
