"""`GET /server_info`: the few values of vLLM's configuration that trainers read before they start."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from rollplane.protocol.info import EngineInfo
from rollplane.server.error_responses import json_response
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service

LOGPROBS_MODES: Final = {"sampling": "processed_logprobs", "greedy": "processed_logprobs", "raw": "raw_logprobs"}


def config_tree(info: EngineInfo) -> dict[str, Any]:
    """`{vllm_config: {...}}`, under vLLM's names.

    `weight_transfer_config` is null where there is no transfer of vLLM's own. `data_parallel_size` is 1: trainers take more for
    replicas of which one gets an adapter that is loaded, and here all do.
    """
    lora, backend = info.capabilities.lora, info.capabilities.native_transfer
    return {
        "vllm_config": {
            "model_config": {
                "model": info.model,
                "max_model_len": info.max_model_len,
                "max_logprobs": info.max_logprobs,
                "logprobs_mode": LOGPROBS_MODES.get(info.capabilities.logprobs_mode),
                **({} if info.dtype is None else {"dtype": info.dtype}),
            },
            "lora_config": None if lora is None else {"max_loras": lora.max, "max_lora_rank": lora.rank},
            "parallel_config": {"data_parallel_size": 1},
            "weight_transfer_config": None if backend is None else {"backend": backend},
        }
    }


async def server_info(request: Request) -> Response:
    """What vLLM's route of this name says, as far as it means something here."""
    service: Service = request.app.state.service
    return json_response(config_tree(service.engine.info))


def server_info_routes() -> list[ApiRoute]:
    """One route."""
    return [
        ApiRoute(
            "/server_info",
            server_info,
            methods=["GET"],
            access="data",
            doc=Doc(
                summary="Values of vLLM's configuration that trainers read",
                tag="health",
                query={"config_format": {"schema": {"type": "string"}}},
                errors=(503,),
            ),
        )
    ]
