#!/usr/bin/env bash
# A Dynamo deployment on this machine: its frontend and some Rollplane workers, found through files. No etcd, no keys, loopback.
#
#     deploy/dynamo-local.sh [WORKERS] [-- ARGUMENTS OF EACH WORKER]
#
#     PYTHON=.venv-dynamo/bin/python deploy/dynamo-local.sh 2 -- --engine mock --served-model-name roll --model-card MODEL
#     PYTHON=.venv-dynamo/bin/python deploy/dynamo-local.sh 1 -- --engine vllm-grpc --grpc-endpoint 127.0.0.1:50051 \
#         --vllm-http-endpoint http://127.0.0.1:8001 --model-card MODEL
#
# MODEL is a directory with the model's configuration and tokenizer. PYTHON has `ai-dynamo` and `rollplane[dynamo]`
# installed (scripts/make_dynamo_env.sh makes such an environment). Ends, with all it started, on Ctrl-C.
set -euo pipefail

python=${PYTHON:-python}
http_port=${HTTP_PORT:-8000}
rl_port=${RL_PORT:-8001}
first_worker_port=${WORKER_PORT:-8100}
workers=1
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    workers=$1
    shift
fi
[[ ${1:-} != -- ]] || shift

store=$(mktemp -d)
started=()
end() {
    trap - EXIT INT TERM
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait || true
    rm -rf "$store"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=$store DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq
export DYN_TCP_RPC_HOST=127.0.0.1

DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1 DYN_ENABLE_RL=true DYN_RL_PORT=$rl_port \
    DYN_LORA_ENABLED=true DYN_LORA_ALLOCATION_ENABLED=false \
    "$python" -m dynamo.frontend --http-host 127.0.0.1 --http-port "$http_port" --router-mode kv &
started+=($!)

for ((i = 0; i < workers; i++)); do
    "$python" -m rollplane.cli.main worker --runtime dynamo --name "worker-$i" --port $((first_worker_port + i)) "$@" &
    started+=($!)
done

printf 'rollouts: http://127.0.0.1:%s/inference/v1/generate   workers: http://127.0.0.1:%s/v1/rl/workers\n' \
    "$http_port" "$rl_port" >&2
wait -n "${started[@]}"
