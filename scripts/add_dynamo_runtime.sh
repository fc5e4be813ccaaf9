#!/usr/bin/env bash
# Adds Dynamo's runtime, and our embedded engine, to the environment of vLLM: there both our engines run on Dynamo's runtime.
#
#     scripts/add_dynamo_runtime.sh [DIR]      DIR defaults to .venv-vllm in the repository's root
#
# Nothing that is there is changed: the runtime comes without its dependencies, of which those that it imports are there. Under
# half a minute.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

dynamo_version=1.6.1

[ -x "${1:-$root/.venv-vllm}/bin/python" ] || die "${1:-$root/.venv-vllm} holds no environment: run scripts/make_vllm_env.sh"
open_environment "${1:-$root/.venv-vllm}"
hash=$(hash_of "${BASH_SOURCE[0]}" "$root/scripts/env_common.sh")

if is_current dynamo-runtime "$hash"; then
    say "Dynamo's runtime $dynamo_version is there"
else
    say "adding Dynamo's runtime $dynamo_version"
    forget_stage dynamo-runtime
    pip_install --no-deps "ai-dynamo-runtime==$dynamo_version"
    install_rollplane embedded grpc test
    "$env_python" -c 'import dynamo.llm, dynamo.runtime, peft, rollplane, torch'
    mark_current dynamo-runtime "$hash"
fi
printf '%s\n' "$env_dir"
