#!/usr/bin/env bash
# Makes the environment of the clients that tests/clients drives unmodified: renderers, verifiers, the OpenAI SDK that they
# are made for, TRL's vLLM client (its files alone, in DIR/trl: it runs under vLLM's own environment), and SkyRL's remote
# client (likewise, in DIR/skyrl: the package as a whole pins another vLLM).
#
#     scripts/make_clients_env.sh [DIR]     DIR defaults to .venv-clients in the repository's root
#
# Prints the environment's path. Rollplane is not in it: its servers run from .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env_common.sh"

open_environment "${1:-$root/.venv-clients}"
clients_hash=$(hash_of "${BASH_SOURCE[0]}" "$root/scripts/env_common.sh")

if is_current clients "$clients_hash"; then
    say "the clients are there"
else
    say "installing the clients"
    forget_stage clients
    pip_install renderers==0.1.12 verifiers==0.4.0 openai==2.54.0 uv \
        httpx hypothesis numpy pytest pytest-asyncio pytest-timeout pytest-xdist
    pip_install --no-deps --upgrade --target "$env_dir/trl" trl==1.16.0
    pip_install --no-deps --upgrade --target "$env_dir/skyrl" skyrl==0.3.0
    "$env_python" -c 'import openai, renderers.client, verifiers.v1'
    mark_current clients "$clients_hash"
fi
printf '%s\n' "$env_dir"
