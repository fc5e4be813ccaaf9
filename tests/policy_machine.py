"""A worker's policy under every order of calls: pause, resume, updates from disk and by broadcast, load, unload, flush,
abort, hang-ups and faults, with requests all the while. No request mixes versions or generations unmarked, none hangs,
every state can be left again.

What an answer ought to be is asked of a second engine that holds one version only: the tokens of each span, given all
tokens before it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.policy_trainer import ENDINGS, Ending, broadcast

from rollplane.engines.base import AdapterHost, WeightReceiver
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NotFound,
    RollplaneError,
    Unavailable,
)
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer, make_request
from rollplane.worker import Worker

BOUND_S = 30.0
TIE_NATS = 1e-4
CONTENTS = 3
ADAPTERS = 3
NEVER = "never"
"""The version of weights that must not get into place."""
NAMES = ("a", "b")
EXPECTED = (Conflict, NotFound, EngineFailed, Unavailable, InvalidRequest, DeadlineExceeded)
"""What an administrator's call may end with."""
LOOP = asyncio.Runner()
"""One event loop for all examples: the engines that answers are held against live as long as the module."""


class Runs(Protocol):
    """Where an example's coroutines run: an `asyncio.Runner`, or whatever an engine that lives longer runs on."""

    def run(self, coro: Coroutine[Any, Any, Any], /) -> Any: ...


@dataclass
class Asked:
    """A request of an example, and what became of it."""

    prompt: list[int]
    model: str | None
    tokens: int
    request_id: str
    task: "asyncio.Task[GenerateResponse]"
    hung_up: bool = False


@dataclass
class Kind:
    """One sort of engine: how to make it, and the files that it takes."""

    checkpoints: list[str]
    adapters: list[str]
    bad_checkpoints: list[str] = field(default_factory=list)
    bad_adapters: list[str] = field(default_factory=list)
    references: dict[int, Any] = field(default_factory=dict)

    def make(self) -> Any:
        raise NotImplementedError

    async def reference(self, content: int) -> Any:
        raise NotImplementedError

    async def differing(
        self, content: int, adapter: int | None, tokens: list[int], first: int, end: int, prompt: list[int]
    ) -> list[str]:
        """Where output tokens [first, end) are not what one version makes, greedily, of all tokens before each."""
        if first >= end:
            return []
        at, stop = len(prompt) + first, len(prompt) + end
        made = (await self._ask(content, adapter, tokens[:at], max_tokens=stop - at)).choices[0].token_ids.tolist()
        pairs = enumerate(zip(made, tokens[at:stop], strict=True))
        return [f"output {first + i} is {theirs}, not {ours}" for i, (ours, theirs) in pairs if ours != theirs]

    async def _ask(self, content: int, adapter: int | None, prompt: list[int], **sampling: Any) -> GenerateResponse:
        if content not in self.references:
            engine = self.references[content] = await self.reference(content)
            for i, path in enumerate(self.adapters):
                await engine.load_adapter(f"ref@{i}", path)
        fields = None if adapter is None else {"adapter": f"ref@{adapter}"}
        request = make_request(prompt, fields=fields, temperature=0, ignore_eos=True, **sampling)
        return await answer(self.references[content], request)


class EmbeddedKind(Kind):
    """A real model, one thread."""

    async def differing(
        self, content: int, adapter: int | None, tokens: list[int], first: int, end: int, prompt: list[int]
    ) -> list[str]:
        """One forward over all tokens says it. Two tokens of equal probability may fall either way on a real model, whose
        sums depend on the batch.
        """
        if first >= end:
            return []
        at, stop = len(prompt) + first, len(prompt) + end
        scores = (await self._ask(content, adapter, tokens[:stop], max_tokens=1, prompt_logprobs=1)).prompt_logprobs
        assert scores is not None
        found = []
        for i in range(at, stop):
            values = scores.values[scores.offsets[i] : scores.offsets[i + 1]]
            gap = float(values.max() - values[0])
            if gap > TIE_NATS:
                found.append(f"output {i - len(prompt)} is {tokens[i]}, by {gap:.2g} nats too unlikely")
        return found

    def make(self) -> EmbeddedEngine:
        return EmbeddedEngine(self.settings(0))

    def settings(self, content: int) -> EmbeddedSettings:
        return EmbeddedSettings(
            model=self.checkpoints[content], policy_version=f"w{content}", threads=1, max_num_seqs=4, max_loras=3
        )

    async def reference(self, content: int) -> EmbeddedEngine:
        engine = EmbeddedEngine(self.settings(content))
        await engine.start()
        return engine


class ControlMachine(RuleBasedStateMachine):
    """All of the module but updates, for an engine that takes none. Calls run beside each other; `pass_time` lets them."""

    kind: Kind
    loop: Runs = LOOP
    unary_spans = True
    """Whether a whole answer knows its boundaries."""
    sleeps = False
    """Whether the engine is put to sleep meanwhile: requests are refused then."""
    exact_after_update = True
    """Whether the tokens of every span are those of its version; a kept request on a real model goes on with older KV."""
    always_clear = False
    """Updates drop all caches, so that kept requests compute theirs again."""

    @initialize()
    def start(self) -> None:
        self.engine = self.kind.make()
        self.worker = Worker(self.engine)
        self.loaded: dict[str, int] = {}
        self.asked: list[Asked] = []
        self.calls: list[asyncio.Task[Any]] = []
        load = self.engine.load_adapter

        async def noted(engine_name: str, path: str) -> None:
            if path in self.kind.adapters:
                self.loaded[engine_name] = self.kind.adapters.index(path)
            await load(engine_name, path)

        self.engine.load_adapter = noted
        assert isinstance(self.engine, WeightReceiver)
        assert isinstance(self.engine, AdapterHost)
        self.loop.run(self.worker.start())
        for i, name in enumerate(NAMES):
            self.loop.run(self.worker.load_adapter(name, self.kind.adapters[i]))
        for model in (None, *NAMES):
            self.ask([11, 12, 13], model, 150, True)

    @rule(
        prompt=st.lists(st.integers(7, 900), min_size=1, max_size=40),
        model=st.sampled_from([None, *NAMES]),
        tokens=st.integers(1, 150),
        stream=st.booleans(),
    )
    def ask(self, prompt: list[int], model: str | None, tokens: int, stream: bool) -> None:
        sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
        request = make_request(prompt, stream=stream, fields={"model": model}, **sampling)
        task = self.spawn(answer(self.worker, request))
        self.asked.append(Asked(prompt, model, tokens, request.request_id, task))

    @rule(mode=st.sampled_from(["keep", "wait", "abort"]), clear_cache=st.booleans())
    def pause(self, mode: Any, clear_cache: bool) -> None:
        self.call(self.worker.pause(mode, clear_cache=clear_cache))

    @rule()
    def resume(self) -> None:
        self.call(self.worker.resume())

    @rule(name=st.sampled_from(NAMES), adapter=st.integers(0, ADAPTERS - 1))
    def load(self, name: str, adapter: int) -> None:
        self.call(self.worker.load_adapter(name, self.kind.adapters[adapter]))

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def load_a_bad_adapter(self, data: st.DataObject, name: str) -> None:
        if self.kind.bad_adapters:
            path = data.draw(st.sampled_from(self.kind.bad_adapters))
            self.call(self.worker.load_adapter(name, path))

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.call(self.worker.unload_adapter(name))

    @rule(preempt=st.booleans())
    def flush(self, preempt: bool) -> None:
        self.call(self.worker.flush_cache(preempt=preempt))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.asked:
            self.call(self.worker.abort(data.draw(st.sampled_from(self.asked)).request_id))

    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        if self.asked:
            asked = data.draw(st.sampled_from(self.asked))
            if not asked.task.done():
                asked.hung_up = True
                asked.task.cancel()

    @rule(turns=st.sampled_from([0, 1, 5, 20]))
    def pass_time(self, turns: int) -> None:
        async def wait() -> None:
            for _ in range(turns + 1):
                await asyncio.sleep(0.001 if turns else 0)

        self.loop.run(wait())

    @invariant()
    def leases_are_those_of_live_requests(self) -> None:
        if hasattr(self, "worker") and self.worker.adapter_table is not None:
            leases = [record.leases for record in self.worker.adapter_table.records()]
            assert min(leases, default=0) >= 0
            assert sum(leases) <= sum(not asked.task.done() for asked in self.asked)

    def teardown(self) -> None:
        if hasattr(self, "worker"):
            try:
                self.loop.run(self.wind_up())
            finally:
                self.loop.run(self.worker.close())

    async def wind_up(self) -> None:
        """Every call and request ends once somebody resumes; then the answers are held against what they should be."""
        async with asyncio.timeout(BOUND_S):
            tasks = [*self.calls, *(asked.task for asked in self.asked)]
            # An update that its trainer left open ends at its deadline; what fails once is asked for again.
            while any(not task.done() for task in tasks) or self.worker.state != "ready":
                await self.recover()
                await asyncio.sleep(0.005)
            await self.recover()
        for call in self.calls:
            error = call.exception()
            assert error is None or isinstance(error, EXPECTED), error
        assert self.worker.state == "ready", [repr(self.worker), *(repr(call.exception()) for call in self.calls)]
        assert self.worker.live_requests == 0
        for asked in self.asked:
            await self.check(asked)
        await self.check_nothing_is_left()

    async def recover(self) -> None:
        """What an operator would do: an update where the version is unknown, then a resume."""
        if self.worker.state == "asleep":
            with contextlib.suppress(RollplaneError):
                await self.worker.wake_up()
        if self.worker.state == "paused":
            with contextlib.suppress(RollplaneError):
                await self.worker.resume()

    async def check(self, asked: Asked) -> None:
        if asked.hung_up:
            return
        error = asked.task.exception()
        if error is not None:
            if self.sleeps and isinstance(error, Unavailable):
                assert "asleep" in error.message or "unknown version" in error.message
                return
            assert isinstance(error, NotFound), error
            assert asked.model is not None
            return
        response = asked.task.result()
        choice = response.choices[0]
        tokens = choice.token_ids.tolist()
        # One that is ended between its last token and the word of it has all of them, and the reason of its end.
        assert choice.finish_reason == "abort" or (choice.finish_reason, len(tokens)) == ("length", asked.tokens)
        generation = response.served_by.adapter_generation
        assert (generation is None) == (asked.model is None)
        adapter = None if asked.model is None else self.loaded[f"{asked.model}@{generation}"]
        spans = choice.policy_versions
        if not self.unary_spans and any(first is None for _, first in spans):
            return  # it says itself that it does not know the boundary
        ends = [first for _, first in spans[1:]] + [len(tokens)]
        for i, ((version, first), end) in enumerate(zip(spans, ends, strict=True)):
            assert first is not None
            assert end is not None
            if i and not self.exact_after_update:
                break
            content = self.content(version)
            for wrong in await self.kind.differing(content, adapter, asked.prompt + tokens, first, end, asked.prompt):
                raise AssertionError(f"{wrong}: {asked.prompt} {asked.model} {spans} {generation} {response.served_by}")

    def content(self, version: str) -> int:
        """Which weights a version's name stands for."""
        return int(version.removeprefix("w"))

    async def check_nothing_is_left(self) -> None:
        """Old generations are gone, and the worker serves what its version says."""
        table = self.worker.adapter_table
        assert table is not None
        async with asyncio.timeout(BOUND_S):
            while any(record.state != "ready" for record in table.records()):  # noqa: ASYNC110 - retries come by time
                await asyncio.sleep(0.005)
        assert sorted(await self.engine.loaded_adapters()) == sorted(r.engine_name for r in table.records())
        prompt, greedy = [7, 8, 9], {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        for model in (None, *sorted(record.name for record in table.records())):
            response = await answer(self.worker, make_request(prompt, fields={"model": model}, **greedy))
            choice = response.choices[0]
            assert choice.policy_versions == [(self.worker.version, 0)]
            adapter = None if model is None else self.loaded[f"{model}@{response.served_by.adapter_generation}"]
            tokens = prompt + choice.token_ids.tolist()
            content = self.content(self.worker.version)
            assert await self.kind.differing(content, adapter, tokens, 0, 8, prompt) == [], (self.worker.version, model)

    def call(self, work: Awaitable[Any]) -> None:
        self.calls.append(self.spawn(work))

    def spawn(self, work: Awaitable[Any]) -> "asyncio.Task[Any]":
        async def begin() -> "asyncio.Task[Any]":
            task: asyncio.Task[Any] = asyncio.ensure_future(work)
            await asyncio.sleep(0)
            return task

        return self.loop.run(begin())


class PolicyMachine(ControlMachine):
    """With updates from disk."""

    @rule(
        content=st.integers(1, CONTENTS - 1), mode=st.sampled_from(["keep", "wait", "abort"]), clear_cache=st.booleans()
    )
    def update(self, content: int, mode: Any, clear_cache: bool) -> None:
        self.call(
            self.worker.update_from_disk(
                self.kind.checkpoints[content],
                version=f"w{content}",
                mode=mode,
                clear_cache=clear_cache or self.always_clear,
            )
        )

    @rule(data=st.data(), mode=st.sampled_from(["keep", "wait", "abort"]))
    def update_from_a_bad_checkpoint(self, data: st.DataObject, mode: Any) -> None:
        """One that does not fit, holds values that are not finite, is cut off, or is not there."""
        if self.kind.bad_checkpoints:
            path = data.draw(st.sampled_from(self.kind.bad_checkpoints))
            self.call(self.worker.update_from_disk(path, version=NEVER, mode=mode))

    @rule(
        content=st.integers(1, CONTENTS - 1),
        adapter=st.integers(0, ADAPTERS - 1),
        name=st.sampled_from(NAMES),
        before=st.sampled_from([0, 3, 20]),
        clear_cache=st.booleans(),
    )
    def step(self, content: int, adapter: int, name: str, before: int, clear_cache: bool) -> None:
        """What a trainer does at each step, with requests under way."""
        self.ask([content, adapter, 20], name, 120, False)
        self.ask([content, adapter, 21], None, 120, True)
        self.pass_time(before)
        self.update(content, "keep", clear_cache)
        self.load(name, adapter)
        self.ask([content, adapter, 22], name, 20, True)

    async def recover(self) -> None:
        if self.worker.state == "failed":
            with contextlib.suppress(RollplaneError):
                await self.worker.update_from_disk(self.kind.checkpoints[1], version="w1")
        await super().recover()


class BroadcastMachine(PolicyMachine):
    """Weights come from a trainer's memory too, over gloo; trainers die, fall silent, or send what is not the model's."""

    @rule(
        content=st.integers(1, CONTENTS - 1),
        mode=st.sampled_from(["keep", "wait", "abort"]),
        clear_cache=st.booleans(),
        ending=st.sampled_from(ENDINGS),
        alone=st.sampled_from([True, True, False]),
    )
    def broadcast(self, content: int, mode: Any, clear_cache: bool, ending: Ending, alone: bool) -> None:
        """Some meet no other call of an administrator's that begins after them: else few would come to their end."""
        whole = ending == "whole"
        self.call(
            broadcast(
                self.worker,
                self.kind.checkpoints[content],
                version=f"w{content}" if whole else NEVER,
                mode=mode,
                clear_cache=clear_cache or self.always_clear,
                ending=ending,
            )
        )
        if alone:
            self.loop.run(self.wait_for(self.calls[-1]))

    @staticmethod
    async def wait_for(call: "asyncio.Task[Any]") -> None:
        await asyncio.wait([call], timeout=3.0)

    @rule(really=st.sampled_from([False, False, True]))
    def leave_the_group(self, really: bool) -> None:
        if really:
            self.call(self.worker.destroy_weights_group())

    async def check_nothing_is_left(self) -> None:
        await super().check_nothing_is_left()
        assert self.worker.broadcast is not None
        assert self.worker.broadcast.state == "absent"


def run_machine(machine: type[ControlMachine], kind: Kind, *, examples: int, steps: int, shrinks: bool = True) -> None:
    """`shrinks`: make a failing example smaller; on a server that takes seconds an example, a test's time is up before."""
    phases = [phase for phase in settings().phases if shrinks or phase not in (Phase.shrink, Phase.explain)]
    test: Any = type(machine.__name__, (machine,), {"kind": kind}).TestCase
    test.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
    test("runTest").runTest()
