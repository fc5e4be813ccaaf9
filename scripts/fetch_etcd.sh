#!/usr/bin/env bash
# Takes the binary `etcd` out of Debian's package `etcd-server`; nothing is installed and no service started.
#
#     scripts/fetch_etcd.sh [DIR]           DIR defaults to .cache/etcd in the repository's root
#
# Prints the binary's path.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

dir=${1:-$root/.cache/etcd}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
binary=$dir/etcd

exec 9>"$dir/.lock"
flock 9
if [ ! -x "$binary" ]; then
    work=$(mktemp -d "$dir/.download.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    (cd "$work" && apt-get download --quiet etcd-server >&2 && dpkg -x etcd-server_*.deb unpacked)
    "$work/unpacked/usr/bin/etcd" --version >/dev/null
    mv "$work/unpacked/usr/bin/etcd" "$binary"  # a rename: nobody ever sees half a file
fi
printf '%s\n' "$binary"
