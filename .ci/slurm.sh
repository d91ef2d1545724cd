#!/usr/bin/env bash
# Run tests/slurm on a Slurm of two nodes: slurm.sh VENV CONSTRAINTS [ARGUMENT OF PYTEST...]. Needs root and apt-get.
#
# Debian's packages are unpacked into build/slurm, and laid over /usr where only the tests see it: they have a network,
# mounts and processes of their own. So nothing is installed, and the kernel ends all of it with the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD/build/slurm

skip() { echo "SKIPPED: $1"; exit 0; }

unpack() {
    echo "==> unpacking Slurm into build/slurm"
    rm -rf "$root"
    mkdir -p "$root/packages"
    local wanted
    wanted=$(apt-get install -s --no-install-recommends slurm-wlm munge libpmix-dev iproute2 |
        sed -n 's/^Inst \([^ ]*\).*/\1/p' | grep -E '^slurm|^munge|^iproute|^lib' | grep -vE '^libc6|^libstdc|^libgcc' || true)
    (cd "$root/packages" && apt-get download -o APT::Sandbox::User=root $wanted >../packages.log 2>&1) ||
        { cat "$root/packages.log" >&2; exit 1; }
    for package in "$root"/packages/*.deb; do dpkg -x "$package" "$root"; done
    for place in bin sbin lib; do # only /usr is laid over the system's
        [ ! -d "$root/$place" ] || cp -a "$root/$place/." "$root/usr/$place/"
    done
    for name in slurmctld slurmd slurmstepd; do
        [ -e "$root/usr/sbin/$name" ] || ln -s "$name-wlm" "$root/usr/sbin/$name"
    done
    touch "$root/complete"
}

inside() {
    mount -t overlay overlay -o "lowerdir=$root/usr:/usr" /usr
    mount -t tmpfs tmpfs /run
    shift
    export TEST_SLURM=1 # the tests change the host's name and mounts
    exec "$@"
}

[ "$1" != --inside ] || inside "$@"

venv=$1 constraints=$2
shift 2
[ "$(id -u)" = 0 ] || skip "Slurm's nodes are made of namespaces, which needs root"
command -v apt-get >/dev/null || skip "the packages come from Debian or Ubuntu, and there is no apt-get"
alone=(unshare --mount --pid --fork --kill-child --mount-proc --net --uts --ipc)
"${alone[@]}" true 2>/dev/null || skip "this root may not make namespaces (in a container: --privileged)"
[ -e "$root/complete" ] || unpack
.ci/mpich.sh "$venv" "$constraints" build
venv=$PWD/$venv
export PATH=$venv/bin:$PATH
unset PYTHONPATH
# unshare ignores SIGTERM, and the first process of a namespace gets none. If unshare is killed, all end.
setpriv --pdeathsig KILL "${alone[@]}" "$0" --inside \
    "$venv/bin/python" -m pytest -q -m slurm --basetemp=build/slurm/tests tests/slurm "$@" &
tests=$!
trap 'kill -KILL $tests' INT TERM HUP
wait $tests
