"""The servers of the image run behind NVIDIA Dynamo: its frontend, and our worker on its runtime before vLLM's gRPC server."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rollplane.demo.image.servers import free_ports, running, there

ROUTES = {
    "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
    "DYN_LORA_ENABLED": "true",  # requests for an adapter go to workers that have it
    "DYN_LORA_ALLOCATION_ENABLED": "false",
}


class Deployment(NamedTuple):
    """Base URLs: of Dynamo's frontend for rollouts, and of our worker for its administration."""

    frontend_url: str
    worker_url: str


@contextlib.contextmanager
def dynamo_deployment(
    model: Path, *, dynamo_env: Path, grpc_endpoint: str, http_endpoint: str, root: Path, logs: Path
) -> Iterator[Deployment]:
    """One frontend and one worker that find each other by files. About 10 s to start.

    Args:
        dynamo_env: an environment with Dynamo 1.6 and this package (`scripts/make_dynamo_env.sh`).
        root: holds the adapters.
        logs: directory for the logs and for the files by which Dynamo's processes find each other.

    Raises:
        InvalidRequest: the environment is missing.
        Unavailable: a server did not start, with the end of its log.
    """
    python = str(there(dynamo_env / "bin" / "python", made_by="scripts/make_dynamo_env.sh"))
    frontend_port, worker_port = free_ports(2)
    shared = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(logs / "dynamo"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(frontend_port)]
    frontend += ["--router-mode", "kv"]
    worker = [python, "-m", "rollplane.cli.main", "worker", "--runtime", "dynamo", "--engine", "vllm-grpc"]
    worker += ["--grpc-endpoint", grpc_endpoint, "--vllm-http-endpoint", http_endpoint, "--model-card", str(model)]
    worker += ["--root", str(root), "--port", str(worker_port), "--drain-s", "2", "--log-level", "warning"]
    worker += ["--engine-option", "logprobs_mode=sampling", "--engine-option", "mm_device_do_normalize=false"]
    urls = Deployment(f"http://127.0.0.1:{frontend_port}", f"http://127.0.0.1:{worker_port}")
    with (
        running(
            frontend,
            log=logs / "dynamo-frontend.log",
            environment=shared | ROUTES,
            health=f"{urls.frontend_url}/health",
        ),
        running(worker, log=logs / "worker.log", environment=shared, health=f"{urls.worker_url}/health"),
    ):
        yield urls
