#!/usr/bin/env bash
# Makes the environment of vLLM's router (PyPI vllm-router), which bench/routing.py compares with.
#
#     scripts/make_vllm_router_env.sh [DIR]      DIR defaults to .venv-vllm-router in the repository's root
#
# Prints the environment's path. No accelerator is needed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

router_version=0.1.17

open_environment "${1:-$root/.venv-vllm-router}"
router_hash=$(hash_of "${BASH_SOURCE[0]}" "$root/scripts/env_common.sh")

if is_current router "$router_hash"; then
    say "vllm-router $router_version is there"
else
    say "installing vllm-router $router_version"
    forget_stage router
    pip_install "vllm-router==$router_version"
    "$env_python" -c 'import vllm_router.router'
    mark_current router "$router_hash"
fi
printf '%s\n' "$env_dir"
