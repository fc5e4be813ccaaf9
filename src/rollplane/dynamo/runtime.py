"""Dynamo's runtime around one worker: the only module that imports it, and only when it starts.

It registers the model (and each adapter as a model of its own), serves the endpoint `generate`, and serves `rl` beside it, by
which `/v1/rl/workers` finds the worker's own administration.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

import msgspec
import structlog

from rollplane.config import DynamoSettings
from rollplane.dynamo.endpoint import Endpoint
from rollplane.dynamo.kv_pump import KvPublisher
from rollplane.dynamo.refusals import refusal_of
from rollplane.errors import EngineFailed, InvalidRequest, RollplaneError
from rollplane.protocol.info import EngineInfo

log = structlog.get_logger("rollplane.dynamo")

HIGHEST_SYSTEM_PORT: Final = 32_767
"""Dynamo reads DYN_SYSTEM_PORT as a signed 16-bit number."""
LEAVE_S: Final = 0.5
"""How long requests that the frontend had already placed here take to arrive after it was told of the leaving."""
END_S: Final = 10.0
UNBLOCKED_TOKENS: Final = 16
"""KV block size registered for an engine without a block cache."""


def check_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Dynamo's own settings that this worker fills in: its system server has no keys, so it is on loopback.

    Raises:
        InvalidRequest: a port that Dynamo cannot read.
    """
    text = environment.get("DYN_SYSTEM_PORT")
    if text and text.lstrip("-").isdigit() and int(text) > HIGHEST_SYSTEM_PORT:
        raise InvalidRequest(
            f"DYN_SYSTEM_PORT is {text}; Dynamo reads it as a signed 16-bit number, so at most {HIGHEST_SYSTEM_PORT}",
            param="DYN_SYSTEM_PORT",
        )
    return {} if environment.get("DYN_SYSTEM_HOST") else {"DYN_SYSTEM_HOST": "127.0.0.1"}


def rl_endpoint_of(generate: str) -> str:
    """The address of `rl` beside `namespace.component.endpoint`.

    Raises:
        InvalidRequest: not three names.
    """
    names = generate.split(".")
    if len(names) != 3 or not all(names):
        raise InvalidRequest(
            f"dynamo.runtime_endpoint must be namespace.component.endpoint, got {generate!r}",
            param="dynamo.runtime_endpoint",
        )
    if names[2] == "rl":
        raise InvalidRequest("dynamo.runtime_endpoint: rl is the administration's", param="dynamo.runtime_endpoint")
    return ".".join([*names[:2], "rl"])


class Runtime:
    """One process's part in a Dynamo deployment.

    Args:
        settings: how it takes part.
        model_path: directory with the model's configuration and tokenizer, for the frontend.
    """

    def __init__(self, settings: DynamoSettings, *, model_path: str) -> None:
        self.settings = settings
        self.model_path = model_path
        self._rl = rl_endpoint_of(settings.runtime_endpoint)
        self._info: EngineInfo | None = None
        self._runtime: Any = None
        self._endpoint: Any = None
        self._serving: asyncio.Future[Any] | None = None
        self._left = False
        self._failure: str | None = None

    def __repr__(self) -> str:
        state = "left" if self._left else "serving" if self._serving is not None else "not started"
        return f"<Runtime {self.settings.runtime_endpoint}, {state}>"

    @property
    def trouble(self) -> str | None:
        """Why the endpoint is not served any more, though nobody asked for that; None where all is well."""
        if self._failure is not None:
            return self._failure
        if self._left or self._serving is None or not self._serving.done():
            return None
        error = None if self._serving.cancelled() else self._serving.exception()
        return f"Dynamo's runtime has ended: {error or 'no reason known'}"

    def fail(self, reason: str) -> None:
        """The worker could not join, for this reason."""
        self._failure = reason

    def about(self, info: EngineInfo) -> None:
        """Take the facts that the model is registered with.

        Raises:
            InvalidRequest: a setting contradicts them.
        """
        asked = self.settings.block_tokens
        if asked is not None and info.block_tokens is not None and asked != info.block_tokens:
            raise InvalidRequest(
                f"dynamo.block_tokens is {asked}, the engine's KV blocks have {info.block_tokens} tokens",
                param="dynamo.block_tokens",
            )
        self._info = info

    def open(self, info: EngineInfo) -> None:
        """Connect to the deployment's discovery.

        Raises:
            InvalidRequest: a setting that contradicts the engine, or that Dynamo cannot read.
            EngineFailed: it cannot be reached.
        """
        self.about(info)
        os.environ.update(check_environment(os.environ))
        from dynamo.runtime import DistributedRuntime

        try:
            self._runtime = DistributedRuntime(
                asyncio.get_running_loop(),
                os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
                os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            )
            self._endpoint = self._runtime.endpoint(self.settings.runtime_endpoint)
        except Exception as error:
            raise EngineFailed(f"Dynamo's runtime does not start: {error}") from error

    def publisher(self) -> KvPublisher:
        """Where the worker's KV events go."""
        from dynamo.llm import KvEventPublisher

        publisher: KvPublisher = KvEventPublisher(
            endpoint=self._endpoint, kv_block_size=self.block_tokens, dp_rank=0, enable_local_indexer=True
        )
        return publisher

    @property
    def block_tokens(self) -> int:
        """The block size that the model is registered with."""
        return self._facts.block_tokens or self.settings.block_tokens or UNBLOCKED_TOKENS

    async def serve(self, endpoint: Endpoint, *, describe: Callable[[], dict[str, Any]]) -> None:
        """Register the base model and serve both endpoints; returns once they are registered.

        Args:
            describe: what the `rl` endpoint says of the worker.

        Raises:
            EngineFailed: the deployment does not take it.
        """

        async def rl(_: Any) -> AsyncGenerator[dict[str, Any], None]:
            yield {"status": "ok", **describe()}

        administration = self._runtime.endpoint(self._rl)
        try:
            await self._register()
        except Exception as error:
            raise EngineFailed(f"Dynamo does not register {self._facts.model}: {error}") from error
        self._serving = asyncio.gather(
            self._endpoint.serve_endpoint(endpoint.generate, graceful_shutdown=True),
            administration.serve_endpoint(rl, graceful_shutdown=True),
        )
        self._runtime.set_health_status(True)
        await asyncio.sleep(0)

    async def show(self, adapter: str) -> None:
        """Register an adapter as a model; asking again is fine.

        Raises:
            EngineFailed: the deployment does not take it.
        """
        try:
            await self._register(adapter=adapter)
        except Exception as error:
            raise EngineFailed(f"Dynamo does not register the adapter {adapter!r}: {error}") from error

    async def hide(self, adapter: str) -> None:
        """Take an adapter's model out of the deployment; one that is not there is no error.

        Raises:
            EngineFailed: it could not be taken out.
        """
        from dynamo.llm import unregister_model

        try:
            await unregister_model(self._endpoint, lora_name=adapter)
        except Exception as error:
            if "could not find" not in str(error).lower():
                raise EngineFailed(f"Dynamo keeps the adapter {adapter!r}: {error}") from error

    async def leave(self) -> None:
        """Take no further request; those under way go on. Idempotent."""
        if self._left or self._serving is None:
            return
        self._left = True
        try:
            await self._endpoint.unregister_endpoint_instance()
        except Exception as error:
            log.warning("dynamo_leave_failed", why=str(error))
        await asyncio.sleep(LEAVE_S)

    async def close(self) -> None:
        """End the runtime."""
        self._left = True
        if self._runtime is None:
            return
        self._runtime.shutdown()
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=END_S)
            self._serving.cancel()

    @property
    def _facts(self) -> EngineInfo:
        if self._info is None:
            raise EngineFailed("Dynamo's runtime was not opened")
        return self._info

    async def _register(self, *, adapter: str | None = None) -> None:
        from dynamo.llm import ModelInput, ModelType, WorkerType, lora_name_to_id, register_model

        base = self._facts.model
        kwargs: dict[str, Any] = {} if adapter is not None else {"model_name": base}
        if adapter is not None:
            kwargs |= {
                "lora_name": adapter,
                "base_model_path": self.model_path,
                "user_data": {"lora_adapter": True, "lora_id": lora_name_to_id(adapter)},
            }
        kinds = ModelType.Chat | ModelType.Completions
        await register_model(
            ModelInput.Tokens,
            kinds,
            self._endpoint,
            self.model_path,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=self.block_tokens,
            runtime_config=self._config(),
            **kwargs,
        )

    def _config(self) -> Any:
        from dynamo.llm import ModelRuntimeConfig

        info, config = self._facts, ModelRuntimeConfig()
        config.context_length = info.max_model_len
        config.max_num_seqs = info.max_num_seqs
        if info.kv_blocks is not None:
            config.total_kv_blocks = info.kv_blocks
        config.data_parallel_size = info.capabilities.data_parallel_size
        flags = {
            "vllm_inference_v1_generate": info.capabilities.native_generate,
            "vllm_enable_tower_connector_lora": info.capabilities.tower_connector_lora,
        }
        for name, on in flags.items():
            config.set_engine_specific(name, msgspec.json.encode(on).decode())
        return config


def as_dynamo(error: RollplaneError) -> BaseException:
    """The exception of Dynamo's that stands for an error of ours; see `dynamo.refusals`."""
    from dynamo.llm.exceptions import Cancelled, EngineShutdown, HttpError, InvalidArgument

    kind = refusal_of(error)
    if kind == "invalid":
        return InvalidArgument(error.message)  # type: ignore[no-any-return]
    if kind == "busy":
        return HttpError(503, error.message)  # type: ignore[no-any-return]
    if kind == "gone":
        return EngineShutdown(error.message)  # type: ignore[no-any-return]
    if kind == "cancelled":
        return Cancelled(error.message)  # type: ignore[no-any-return]
    return HttpError(500, error.message)  # type: ignore[no-any-return]
