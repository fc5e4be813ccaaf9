#!/usr/bin/env bash
# Takes vLLM's Rust server, the binary `vllm-rs`, out of vLLM's wheel. It is the same file for every device: it starts the
# Python engine of the environment whose `python` is first in PATH.
#
#     scripts/fetch_vllm_rs.sh [DIR]        DIR defaults to .cache/vllm-rs in the repository's root
#
# Prints the binary's path. The wheel (about 320 MB) is deleted afterwards.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

vllm_version=0.31.0
dir=${1:-$root/.cache/vllm-rs}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
binary=$dir/vllm-rs-$vllm_version

exec 9>"$dir/.lock"
flock 9
if [ ! -x "$binary" ]; then
    work=$(mktemp -d "$dir/.download.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --no-cache-dir --dest "$work" "vllm==$vllm_version"
    "${PYTHON:-python3}" - "$work" <<'PY'
import pathlib
import shutil
import sys
import zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive, archive.open("vllm/vllm-rs") as source, open(work / "vllm-rs", "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
PY
    chmod 755 "$work/vllm-rs"
    "$work/vllm-rs" --help >/dev/null  # a binary for another machine must fail here, not in a test
    mv "$work/vllm-rs" "$binary"  # a rename: nobody ever sees half a file
fi
printf '%s\n' "$binary"
