"""vLLM's own HTTP server: over an engine of ours (the same weights and engine core, its own route code), or over any other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rollplane.engines.vllm.inprocess import VllmEngine


@asynccontextmanager
async def own_server(engine: VllmEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of vLLM's routes over this engine, called in this process; unary answers only."""
    async with server_over(engine._engine, model=engine.settings.model) as client:
        yield client


@asynccontextmanager
async def server_over(vllm: Any, *, model: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of vLLM's routes over one of its own `AsyncLLM`s."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", model, "--served-model-name", "policy", "--enable-scale-out"]
    )
    tasks = await vllm.get_supported_tasks()
    app = build_app(args, tasks, vllm.vllm_config.model_config)
    await init_app_state(vllm, app.state, args, tasks)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://vllm", timeout=600) as client:
        yield client


async def own_answer(client: httpx.AsyncClient, token_ids: list[int], **sampling: Any) -> tuple[int, dict[str, Any]]:
    """Status and body of vLLM's own Generate route."""
    body = {"model": "policy", "token_ids": token_ids, "sampling_params": sampling}
    answer = await client.post("/inference/v1/generate", json=body)
    return answer.status_code, answer.json()


def own_tokens(body: dict[str, Any], index: int = 0) -> list[int]:
    found: list[int] = body["choices"][index]["token_ids"]
    return found


def own_logprobs(body: dict[str, Any], index: int = 0) -> list[float]:
    return [entry["logprob"] for entry in body["choices"][index]["logprobs"]["content"]]
