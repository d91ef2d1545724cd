#!/usr/bin/env bash
# Build hvpipe against Debian's Open MPI 4.1 on UCX, which carries MPI over InfiniBand, and run the suites that
# tests/test_mpi.py keeps for it: ucx.sh VENV. Needs apt-get, but not root: the packages are unpacked into
# build/ucx. UCX_TLS chooses what UCX sends by: sm (default), tcp, or what a host's cards offer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/$1 own=$PWD/.venv-ucx log=build/ucx.log root=$PWD/build/ucx
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if ! command -v apt-get >/dev/null; then
    echo "SKIPPED: the packages come from Debian or Ubuntu, and there is no apt-get"
    exit 0
fi
if [ ! -e "$root/complete" ]; then
    echo "==> unpacking Open MPI and UCX into build/ucx"
    rm -rf "$root"
    mkdir -p "$root/packages" "$root/bin"
    wanted=$(apt-get install -s --no-install-recommends openmpi-bin libopenmpi-dev libucx0 | sed -n 's/^Inst \([^ ]*\).*/\1/p' |
        grep -E '^lib|^openmpi|^ocl|^ibverbs' | grep -vE 'gfortran|gcc|stdc|jquery')
    (cd "$root/packages" && apt-get download $wanted >/dev/null 2>&1)
    for package in "$root"/packages/*.deb; do dpkg -x "$package" "$root"; done
    for tool in mpicc mpicxx mpirun mpiexec; do ln -s "../usr/bin/$tool.openmpi" "$root/bin/$tool"; done
    touch "$root/complete"
fi
libraries=$(dirname "$(find "$root/usr" -name 'libucp.so.0' | head -n 1)")
export OPAL_PREFIX=$root/usr PMIX_INSTALL_PREFIX=$libraries/pmix2
export LD_LIBRARY_PATH=$libraries:$libraries/openmpi/lib:$libraries/ucx:$libraries/pmix2/lib:$root/usr/lib/libpsm1:$root/lib/$(basename "$libraries")
# UCX takes part only with one of its networks, which "any" says not to ask for.
export OMPI_MCA_pml=ucx OMPI_MCA_pml_ucx_tls=any OMPI_MCA_pml_ucx_devices=any UCX_TLS=${UCX_TLS:-sm}
[ -x "$own/bin/python" ] || "$venv/bin/python" -m venv --without-pip "$own"
packages "$venv" >"$(packages "$own")/others.pth" # the editable hvpipe in there is not seen
export PATH=$root/bin:$own/bin:$venv/bin:$PATH SKBUILD_BUILD_DIR=build/venv-ucx
unset PYTHONPATH
. .ci/ccache.sh
echo "==> building hvpipe against $(mpirun --version | head -n 1), with UCX over $UCX_TLS"
VIRTUAL_ENV=$own "$own/bin/python" -m pip install --no-build-isolation --no-deps -e . >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
"$own/bin/python" -m pytest -q -m ucx -n 2 tests/test_mpi.py
