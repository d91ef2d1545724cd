#!/usr/bin/env bash
# Build the Dockerfile's file system (image.py) and run `make train`'s job in it on two hosts: container.sh [MPI...]
#
# Each host is a network namespace with a chroot of its own, over the same layers, and sshd on port 2222 as uid 1000,
# as pods have it. MPI is openmpi, ucx or both (default). Skipped without root, debootstrap, overlayfs or namespaces.
# IMAGE_FOLDER (default /var/tmp/hvpipe-image) keeps the layers and pip's downloads, some 6 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Not in this repository: whoever reads its folders, such as an sdist, would read the roots, too.
folder=${IMAGE_FOLDER:-/var/tmp/hvpipe-image} net=hvc$$
jobs=$folder/job
say() { printf '==> %s\n' "$*"; }
skip() { printf 'SKIPPED: container-test: %s\n' "$*"; exit 0; }

[ "$(id -u)" = 0 ] || skip "it makes chroots, mounts and namespaces, and this is uid $(id -u), not root"
for tool in debootstrap ip ssh-keygen; do
    command -v "$tool" >/dev/null || skip "no $tool (Debian: apt-get install debootstrap iproute2 openssh-client)"
done
case $folder in *[:,\\]* | *[[:space:]]*) skip "overlayfs cannot mount layers in $folder" ;; esac
apt-get indextargets --format '$(CODENAME)' 2>/dev/null | grep -qx bookworm || skip "apt here has no Debian 12"
mkdir -p "$folder"/try/{lower,upper,work,root}
exec 9>"$folder/lock"
flock -n 9 || { echo "error: another container-test uses $folder" >&2; exit 2; }
if mount | grep -q " $jobs/"; then echo "error: an earlier run has left mounts: umount -R $jobs/*/root" >&2; exit 2; fi
mount -t overlay overlay -o "lowerdir=$folder/try/lower,upperdir=$folder/try/upper,workdir=$folder/try/work" "$folder/try/root" \
    2>/dev/null || skip "no overlayfs here"
umount "$folder/try/root"
ip netns add "$net-try" 2>/dev/null || skip "no network namespaces here"
ip netns del "$net-try"
[ "$#" -gt 0 ] || set -- openmpi ucx
for mpi in "$@"; do case $mpi in openmpi | ucx) ;; *) echo "error: MPI should be openmpi or ucx. Received: $mpi" >&2; exit 2 ;; esac; done

clean_up() {
    local host
    for host in h0 h1; do
        [ ! -e "/run/netns/$net-$host" ] || ip netns pids "$net-$host" | xargs -r kill -KILL 2>/dev/null || true
        ip netns del "$net-$host" 2>/dev/null || true
        [ ! -d "$jobs/$host" ] || umount -R -l "$jobs/$host/root" 2>/dev/null || true
        rm -rf "/etc/netns/$net-$host"
    done
    rm -rf --one-file-system "$jobs" # never into a /dev that is still mounted there
}
trap clean_up EXIT

# inside HOST COMMAND...: as uid 1000 in a host, with the environment that the image sets, and a limit of time.
inside() {
    local host=$1
    shift
    timeout 420 ip netns exec "$net-$host" unshare --uts --mount sh -c \
        'hostname "$1" && mount -t sysfs sysfs "$2/sys" && shift 2 && exec "$@"' sh "$host" "$jobs/$host/root" \
        chroot --userspec=1000:1000 --groups=1000 "$jobs/$host/root" \
        /usr/bin/env -i HOME=/home/train USER=train PATH=/opt/hvpipe/bin:/usr/local/bin:/usr/bin:/bin TF_CPP_MIN_LOG_LEVEL=2 \
        sh -c 'cd /work && exec "$@"' sh "$@"
}

# make_host NAME ADDRESS: a root over the image's layers, with /proc, /dev, the job's key and the shared folder /work.
make_host() {
    local at=$jobs/$1 lower
    mkdir -p "$at"/{upper,work,root}
    lower=$(python3 -c 'import json, sys; print(":".join("layers/" + n for n in reversed(json.load(open(sys.argv[1]))["layers"])))' "$folder/image.json")
    (cd "$folder" && mount -t overlay overlay -o "lowerdir=$lower,upperdir=$at/upper,workdir=$at/work" "$at/root")
    mount -t proc proc "$at/root/proc"
    mount --rbind /dev "$at/root/dev"
    mount --make-rslave "$at/root/dev"
    mount -t tmpfs -o size=1g,mode=1777 tmpfs "$at/root/dev/shm"
    mount --bind "$jobs/shared" "$at/root/work"
    printf '127.0.0.1 localhost\n10.78.0.1 h0\n10.78.0.2 h1\n' >"$at/root/etc/hosts"
    mkdir -p "$at/root/home/train/.ssh"
    cp "$jobs"/key/* "$at/root/home/train/.ssh/"
    chown -R 1000:1000 "$at/root/home/train/.ssh"
    ip netns add "$net-$1"
    ip -n "$net-$1" link set lo up
}

make_hosts() {
    mkdir -p "$jobs"/{shared,key}
    chown 1000:1000 "$jobs/shared"
    ssh-keygen -q -t rsa -b 3072 -N '' -f "$jobs/key/id_rsa"
    cp "$jobs/key/id_rsa.pub" "$jobs/key/authorized_keys"
    make_host h0
    make_host h1
    ip -n "$net-h0" link add eth0 type veth peer name eth0 netns "$net-h1"
    for host in h0 h1; do
        ip -n "$net-$host" addr add "10.78.0.$((${host#h} + 1))/24" dev eth0
        ip -n "$net-$host" link set eth0 up
        inside "$host" /usr/sbin/sshd -f /etc/hvpipe/sshd_config
    done
}

# test_image MPI: what docs/containers.md promises, in the image with that MPI.
test_image() {
    say "MPI=$1: building"
    local started=$SECONDS bytes
    python3 .ci/image.py build "$folder" "MPI=$1"
    bytes=$(python3 -c 'import json, sys; print(" ".join(json.load(open(sys.argv[1]))["layers"]))' "$folder/image.json" |
        xargs -n1 printf "$folder/layers/%s\n" | xargs du -scm | sed -n 's/\s*total//p')
    say "MPI=$1: $bytes MB, built in $((SECONDS - started)) s"
    make_hosts
    [ "$(inside h0 id -u)" = 1000 ] || { echo "error: not uid 1000" >&2; exit 1; }
    if inside h0 sh -c 'for each in cc gcc g++ c++ clang; do ! command -v $each || exit 0; done; exit 1'; then
        echo "error: the last stage has a compiler" >&2
        exit 1
    fi
    inside h0 hvpipe doctor
    say "MPI=$1: hvpipe doctor --all-hosts"
    inside h0 hvpipe doctor --all-hosts --hosts h0:1,h1:1
    say "MPI=$1: training on two hosts of one rank each"
    inside h0 hvpipe run --hosts h0:1,h1:1 /opt/hvpipe/examples/train.py --epochs 2 --progress epoch --save /work/model.keras
    [ -s "$jobs/shared/model.keras" ] || { echo "error: train.py saved no model" >&2; exit 1; }
    [ "$(stat -c %u "$jobs/shared/model.keras")" = 1000 ] || { echo "error: the model is not of uid 1000" >&2; exit 1; }
    say "MPI=$1: two ranks on each host, over MPI"
    inside h0 hvpipe run --hosts h0:2,h1:2 /opt/hvpipe/examples/train.py --epochs 1 --progress epoch
    say "MPI=$1: works"
    clean_up
}

for mpi in "$@"; do test_image "$mpi"; done
