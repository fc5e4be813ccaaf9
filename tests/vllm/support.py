"""An engine over a tiny model, and short ways to ask it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.engines.vllm.settings import VllmSettings
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer, make_request

BEGIN_AGAIN_S = 60.0
ENGINE_ARGS = (
    "--enforce-eager",
    "--block-size",
    "32",  # 128 on a CPU unless told: prompts of a test would never fill a block
)


def settings_of(model: Path, *engine_args: str, **settings: Any) -> VllmSettings:
    """Settings of a small engine in float32."""
    return VllmSettings(
        model=str(model),
        served_model_name=("policy",),
        policy_version="initial",
        dtype="float32",
        max_model_len=settings.pop("max_model_len", 2048),
        max_num_seqs=16,
        engine_args=(*ENGINE_ARGS, *engine_args),
        **settings,
    )


def make_engine(model: Path, *engine_args: str, **settings: Any) -> VllmEngine:
    """An engine that is not started."""
    return VllmEngine(settings_of(model, *engine_args, **settings))


class LastingEngine(VllmEngine):
    """An engine that several workers have one after the other: starting it again brings it back to how it began."""

    first_version = "initial"

    async def start(self) -> None:
        if self._api is None:
            await super().start()
        else:
            async with asyncio.timeout(BEGIN_AGAIN_S):
                await self.begin_again()

    async def begin_again(self) -> None:
        """No request, no adapter, no group, the first weights, running."""
        for request_id in list(self._live):
            await self.abort(request_id)
        await self._idle.wait()
        await self.leave_group()
        for name in await self.loaded_adapters():
            await self.unload_adapter(name)
        await self.pause("abort", clear_cache=True)
        await self.apply_weights(await self.stage_weights(self.settings.model), version=self.first_version)
        await self.resume()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """A worker's close ends the worker only."""

    async def end(self) -> None:
        await super().close()


@asynccontextmanager
async def running(model: Path, *engine_args: str, **settings: Any) -> AsyncIterator[VllmEngine]:
    """A started engine that is closed afterwards."""
    engine = make_engine(model, *engine_args, **settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def prompt(length: int = 40, *, variant: int = 0) -> list[int]:
    """Token ids of the tiny models, away from the special ones."""
    return np.random.default_rng(variant).integers(300, 1000, length).tolist()


async def ask(
    engine: VllmEngine,
    token_ids: Sequence[int] | None = None,
    *,
    options: dict[str, Any] | None = None,
    stream: bool = False,
    fields: dict[str, Any] | None = None,
    **sampling: Any,
) -> GenerateResponse:
    """The validated answer to one request."""
    ids = prompt() if token_ids is None else token_ids
    return await answer(engine, make_request(ids, options=options, stream=stream, fields=fields, **sampling))


def tokens(response: GenerateResponse, index: int = 0) -> list[int]:
    """The token ids of one choice."""
    found: list[int] = response.choices[index].token_ids.tolist()
    return found


def logprobs(response: GenerateResponse, index: int = 0) -> np.ndarray[Any, Any]:
    """The log-probabilities of one choice's tokens."""
    found = response.choices[index].logprobs
    assert found is not None
    return found.values
