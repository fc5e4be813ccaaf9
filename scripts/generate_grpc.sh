#!/usr/bin/env bash
# Makes the Python of src/rollplane/engines/grpc/proto/*.proto: `*_pb2.py` and its types, `*_pb2.pyi`.
#
#     scripts/generate_grpc.sh
#
# The generator is pinned below what is installed for tests: generated code refuses a protobuf runtime older than its
# generator and one more than a major version newer, so this one serves protobuf 6.31 up to 7.x.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

tools_version=1.74.0
env=$root/.cache/grpc-tools-$tools_version
if [ ! -x "$env/bin/python" ]; then
    python3 -m venv "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check "grpcio-tools==$tools_version" 'setuptools<81'
fi
cd "$root/src"
"$env/bin/python" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. rollplane/engines/grpc/proto/*.proto
