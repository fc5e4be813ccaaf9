"""What `rollplane worker --runtime dynamo` adds to a worker: its part in a Dynamo deployment."""

import asyncio
from collections.abc import Callable

import structlog

from rollplane.config import DynamoSettings, ServerSettings, Settings, WorkerSettings
from rollplane.dynamo.endpoint import Endpoint
from rollplane.dynamo.kv_pump import KvPump
from rollplane.dynamo.runtime import Runtime, as_dynamo
from rollplane.dynamo.worker import DynamoWorker
from rollplane.errors import InvalidRequest, RollplaneError
from rollplane.server.service import Service

log = structlog.get_logger("rollplane.dynamo")


def runtime_of(settings: Settings) -> Runtime:
    """The deployment that the settings name, not opened.

    Raises:
        InvalidRequest: Dynamo's frontend needs a directory with the model's configuration and tokenizer, and none is named.
    """
    about, dynamo = settings.table(WorkerSettings), settings.table(DynamoSettings)
    path = dynamo.model_card or settings.table(ServerSettings).tokenizer or about.model
    if path is None:
        raise InvalidRequest(
            "dynamo.model_card must name a directory with the model's configuration and tokenizer: Dynamo's frontend reads it",
            param="dynamo.model_card",
        )
    return Runtime(dynamo, model_path=path)


class Membership:
    """A started worker's part in its deployment: joined once it serves, kept until it ends.

    Args:
        on_joined: called once requests can come.
    """

    def __init__(
        self, runtime: Runtime, worker: DynamoWorker, service: Service, *, on_joined: Callable[[], None]
    ) -> None:
        self._runtime = runtime
        self._worker = worker
        self._service = service
        self._on_joined = on_joined
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Membership of {self._worker!r} in {self._runtime!r}>"

    def begin(self) -> None:
        """Join, in a task of its own; a failure ends the server."""
        self._tasks.append(asyncio.create_task(self._join(), name="join dynamo"))

    async def end(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(self) -> None:
        runtime, worker = self._runtime, self._worker
        try:
            endpoint = Endpoint(self._service, partial=runtime.settings.partial_rollouts, as_dynamo=as_dynamo)
            runtime.open(worker.info)
            if runtime.settings.publish_kv_events and worker.says_kv_events:
                pump = KvPump(worker, runtime.publisher(), scopes=worker.scopes, block_tokens=runtime.block_tokens)
                self._tasks.append(asyncio.create_task(pump.run(), name="dynamo kv events"))
                self._tasks[-1].add_done_callback(_report)
            await runtime.serve(endpoint, describe=worker.description)
            for record in await worker.adapters():
                if record.state == "ready":
                    await runtime.show(record.name)
        except RollplaneError as error:
            log.error("dynamo_join_failed", why=error.message)
            runtime.fail(error.message)
            return
        log.info("dynamo_joined", endpoint=runtime.settings.runtime_endpoint, model=worker.info.model)
        self._on_joined()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("dynamo_kv_events_ended", exc_info=error)
