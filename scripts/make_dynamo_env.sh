#!/usr/bin/env bash
# Makes the environment of NVIDIA Dynamo (frontend, router, vLLM sidecar), with this package installed in it (editable).
#
#     scripts/make_dynamo_env.sh [DIR]      DIR defaults to .venv-dynamo in the repository's root
#
# Prints the environment's path. No accelerator is needed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

dynamo_version=1.6.1

open_environment "${1:-$root/.venv-dynamo}"
dynamo_hash=$(hash_of "${BASH_SOURCE[0]}" "$root/scripts/env_common.sh")
rollplane_hash=$(rollplane_hash_of "${BASH_SOURCE[0]}" "$root/scripts/env_common.sh")

if is_current dynamo "$dynamo_hash"; then
    say "Dynamo $dynamo_version is there"
else
    say "installing Dynamo $dynamo_version"
    forget_stage dynamo
    forget_stage rollplane
    # Without dependencies, then those that its frontend and sidecar import: a planner's simulator that Dynamo also lists
    # is needed by neither.
    pip_install --no-deps "ai-dynamo-runtime==$dynamo_version" "ai-dynamo==$dynamo_version"
    pip_install uvloop "aiohttp>=3.14.3" msgspec prometheus-client pyzmq redis tqdm transformers zstandard \
        "kubernetes<33" "pydantic<=2.13.5"
    pip_install kubernetes-validate  # for the files in deploy/kubernetes
    "$env_python" -c 'import dynamo.llm, dynamo.runtime'
    "$env_python" -m dynamo.frontend --help >/dev/null
    "$env_python" -m dynamo.vllm.sidecar --help >/dev/null
    mark_current dynamo "$dynamo_hash"
fi

if is_current rollplane "$rollplane_hash"; then
    say "rollplane is there"
else
    say "installing rollplane beside it"
    install_rollplane grpc test
    "$env_python" -c 'import dynamo.runtime, grpc, pytest, rollplane'
    mark_current rollplane "$rollplane_hash"
fi
printf '%s\n' "$env_dir"
