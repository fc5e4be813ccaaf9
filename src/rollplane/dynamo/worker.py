"""A worker whose model and adapters are also known to a Dynamo deployment."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from rollplane.dynamo.scopes import Scopes
from rollplane.engines.base import Engine
from rollplane.errors import RollplaneError
from rollplane.protocol.admin import AdapterRecord
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth
from rollplane.protocol.request import GenerateRequest
from rollplane.rl.base import Operation
from rollplane.worker import Worker, WorkerSettings


class Deployment(Protocol):
    """What a worker needs of the deployment; `dynamo.runtime.Runtime` is one."""

    @property
    def trouble(self) -> str | None:
        """Why it takes no requests any more, None where all is well."""
        ...

    async def show(self, adapter: str) -> None:
        """Let requests for an adapter come here."""
        ...

    async def hide(self, adapter: str) -> None:
        """Let no further ones come."""
        ...

    async def leave(self) -> None:
        """Let no further requests come."""
        ...

    async def close(self) -> None:
        """End."""
        ...


class DynamoWorker(Worker):
    """A `Worker` that shows its adapters to the deployment once they are loaded and hides them before they are unloaded."""

    def __init__(self, engine: Engine, *, deployment: Deployment, settings: WorkerSettings | None = None) -> None:
        super().__init__(engine, settings=settings)
        self._deployment = deployment
        self.scopes = Scopes(self)
        """What callers sent of salts, on whatever way they came."""
        self._by_name: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """See `Worker.generate`."""
        self.scopes.note(request.cache_salt)
        return super().generate(request)

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.load_adapter`; done once requests for it can come. Asking again registers it again."""
        async with self._by_name[name]:
            record = await super().load_adapter(name, path, operation=operation)
            await self._deployment.show(name)
            return record

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.unload_adapter`; hidden first. One that the engine then keeps is shown again."""
        async with self._by_name[name]:
            await self._deployment.hide(name)
            try:
                return await super().unload_adapter(name, operation=operation)
            except RollplaneError:
                if self.adapter_table is not None and self.adapter_table.serves(name):
                    with contextlib.suppress(RollplaneError):
                        await self._deployment.show(name)
                raise

    async def health(self) -> EngineHealth:
        """The worker's health; one whose deployment is lost is as good as dead."""
        health = await super().health()
        trouble = self._deployment.trouble
        if trouble is None:
            return health
        return msgspec.structs.replace(health, alive=False, state="failed", reason=trouble)

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Leave the deployment, then as `Worker.close`."""
        await self._deployment.leave()
        try:
            await super().close(grace_s=grace_s)
        finally:
            await self._deployment.close()

    def description(self) -> dict[str, Any]:
        """What the `rl` endpoint says of this worker: its own administration, which has keys."""
        url = self.settings.system_url
        return {"routes": self.routes(), "world_size": self.info.world_size, "system_url": url, "admin_base_url": url}
