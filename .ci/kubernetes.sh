#!/usr/bin/env bash
# Run the commands of examples/kubernetes in network namespaces, as pods: kubernetes.sh VENV. Needs root and, on
# machines other than Debian and Ubuntu, sshd, ssh and ip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$(id -u)" != 0 ]; then
    echo "SKIPPED: pods need root, for namespaces"
    exit 0
fi
missing=()
[ -x /usr/sbin/sshd ] || missing+=(openssh-server)
command -v ssh >/dev/null || missing+=(openssh-client)
command -v ip >/dev/null || missing+=(iproute2)
if [ ${#missing[@]} -gt 0 ]; then
    if ! command -v apt-get >/dev/null; then
        echo "SKIPPED: pods need ${missing[*]}, and there is no apt-get"
        exit 0
    fi
    if [ -d /run/systemd/system ]; then
        echo "SKIPPED: pods need ${missing[*]}, whose installation would start an sshd for all: apt-get install ${missing[*]}"
        exit 0
    fi
    echo "==> installing ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >build/kubernetes.log 2>&1 ||
        { cat build/kubernetes.log >&2; exit 1; }
fi
unset PYTHONPATH
"$1/bin/python" -m pytest -q -m pods tests/kubernetes
