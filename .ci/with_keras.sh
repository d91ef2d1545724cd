#!/usr/bin/env bash
# Run a command with another Keras in front of the venv's: with_keras.sh VENV VERSION COMMAND...
#
# This Keras lies in a folder of its own inside VENV. A second run finds it there.
set -euo pipefail
venv=$1 version=$2
shift 2
overlay=$PWD/$venv/overlays/keras-$version

if [ ! -d "$overlay" ]; then
    rm -rf "$overlay.new"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps \
        --target "$overlay.new" "keras==$version"
    mv "$overlay.new" "$overlay"
fi
export PYTHONPATH=$overlay
found=$("$venv/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("keras"))')
[ "$found" = "$version" ] || { echo "error: wanted: Keras $version. Received: $found" >&2; exit 1; }
exec "$@"
