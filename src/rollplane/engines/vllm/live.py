"""Requests that vLLM runs now: each choice's place in the engine, its version spans, and its move at an update."""

import asyncio
import time
from typing import Any

from rollplane.engines.vllm.convert import ChoicePlan
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.versions import VersionSpans


class LiveChoice:
    """One choice: one vLLM request, which may be another one after an update that found it without tokens."""

    def __init__(self, index: int, params: Any, version: str) -> None:
        self.index = index
        self.params = params
        self.collector: Any = None
        self.spans = VersionSpans(version)
        self.sent = 0
        self.ended = False
        self.cleared_at: int | None = None
        self.recomputed_at: int | None = None
        self._error: Exception | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    def __repr__(self) -> str:
        state = "ended" if self.ended else "waiting" if self.collector is None else "running"
        return f"<LiveChoice {self.index} {state}, {self.sent} sent>"

    async def next_output(self) -> Any:
        """The next output of whichever vLLM request stands for this choice; outputs of one that was left are dropped."""
        while True:
            await self._settled.wait()
            if self._error is not None:
                raise self._error
            collector = self.collector
            output = await collector.get()
            if collector is self.collector and self._settled.is_set() and self._error is None:
                return output

    def leave(self) -> Any:
        """Stop reading the present vLLM request, which the caller aborts, until `settle` names the next one."""
        self._settled.clear()
        return self.collector

    def settle(self, collector: Any) -> None:
        """Read this vLLM request from now on."""
        self.collector = collector
        self._settled.set()

    def fail(self, error: Exception) -> None:
        """There will be no next output: the reader gets this error."""
        self._error = error
        self._settled.set()


class LiveRequest:
    """A request of ours in the engine."""

    def __init__(self, request: GenerateRequest, plan: ChoicePlan) -> None:
        self.request = request
        self.plan = plan
        self.prompt: Any = None
        self.prompt_tokens = plan.prompt_tokens
        self.lora: Any = None
        self.choices: list[LiveChoice] = []
        self.began = time.monotonic()
        self.aborted = asyncio.Event()
        self.floored = 0
        self.recomputed_rows = 0

    def __repr__(self) -> str:
        return f"<LiveRequest {self.request.request_id}: {self.choices}>"

    @property
    def open_choices(self) -> list[LiveChoice]:
        """Choices that vLLM has and that have not ended."""
        return [choice for choice in self.choices if choice.collector is not None and not choice.ended]
