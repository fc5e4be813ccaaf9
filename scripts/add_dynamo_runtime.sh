#!/usr/bin/env bash
# Adds Dynamo's runtime and its own vLLM worker, and our embedded engine, to the environment of vLLM: there all of them, ours
# and Dynamo's, run on Dynamo's runtime.
#
#     scripts/add_dynamo_runtime.sh [DIR]      DIR defaults to .venv-vllm in the repository's root
#
# Nothing that is there is changed: Dynamo's packages come without their dependencies, of which those that are imported are
# there or are installed by name. Dynamo's worker brings plugins for pytest and for vLLM, which are for it alone; so it is in a
# directory of its own, DIR/dynamo-worker, that a process of it has in PYTHONPATH. Under half a minute.
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
    rm -rf "$env_dir/dynamo-worker"
    pip_install --no-deps --target "$env_dir/dynamo-worker" "ai-dynamo==$dynamo_version" redis
    install_rollplane embedded grpc test
    "$env_python" -c 'import dynamo.llm, dynamo.runtime, peft, rollplane, torch'
    mark_current dynamo-runtime "$hash"
fi
printf '%s\n' "$env_dir"
