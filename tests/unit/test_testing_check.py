"""The contract checks catch engines that break a promise: each engine here breaks one."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.contract.native_cases import TRANSFER

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import EngineFailed, InvalidRequest
from rollplane.protocol.admin import FlushReport, PauseMode, PauseReport, StagedWeights
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event
from rollplane.protocol.info import EngineHealth, MoeShape
from rollplane.protocol.request import GenerateRequest
from rollplane.testing import CHECKS, CheckFailed, Report, Subject, check_engine, run_check
from rollplane.testing.checks.subject import MomentMissed

BY_NAME = {check.__name__: check for check in CHECKS}
SETTINGS = MockSettings(moe=MoeShape(layers=2, top_k=2, num_experts=16), sampling_mask=True, vocab_tokens=128)


class SharedSeed(MockEngine):
    """All children of a seed are the same."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        if request.sampling.choices == 1:
            async for event in super().generate(request):
                yield event
            return
        one = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, n=1))
        async for event in super().generate(one):
            if not isinstance(event, ChoiceEvent):
                yield event
                continue
            for i in range(request.sampling.choices):
                yield msgspec.structs.replace(event, index=i)


class Sixteen(MockEngine):
    """max_tokens omitted is 16."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        if request.sampling.get("max_tokens") is None:
            sampling = msgspec.structs.replace(request.sampling, max_tokens=16)
            request = msgspec.structs.replace(request, sampling=sampling)
        async for event in super().generate(request):
            yield event


class OddTopK(MockEngine):
    """top_k 0 keeps the best token only."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        if request.sampling.top_k == 0:
            request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, top_k=1))
        async for event in super().generate(request):
            yield event


class Ignores(MockEngine):
    """Accepts stop strings and ignores them."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        sampling = msgspec.structs.replace(request.sampling, stop=None)
        async for event in super().generate(msgspec.structs.replace(request, sampling=sampling)):
            yield event


class ForeignErrors(MockEngine):
    """Refuses with errors that are not ours."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        try:
            async for event in super().generate(request):
                yield event
        except InvalidRequest as error:
            raise ValueError(str(error)) from None


class Chatty(MockEngine):
    """Sends deltas to unary requests."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        async for event in super().generate(msgspec.structs.replace(request, stream=True)):
            yield event


class Shifted(MockEngine):
    """A stream's last token is another one."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        async for event in super().generate(request):
            if request.stream and isinstance(event, ChoiceEvent) and event.finish_reason and event.token_ids.size:
                event.token_ids = (event.token_ids + 1).astype(np.int32)
            yield event


class Leaky(MockEngine):
    """Goes on with a request that its reader left."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        events = super().generate(request)
        self.kept = [*getattr(self, "kept", []), events]
        while True:
            try:
                yield await anext(events)
            except StopAsyncIteration:
                return


class LossyAbort(MockEngine):
    """An abort loses the last tokens."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        held: Event | None = None
        async for event in super().generate(request):
            if isinstance(event, ChoiceEvent) and event.finish_reason == "abort" and request.stream:
                empty = np.empty(0, dtype=np.int32)
                yield ChoiceEvent(index=event.index, token_ids=empty, finish_reason="stop")
                continue
            held = event
            yield held


class CountingAbort(MockEngine):
    """Counts ids it does not know."""

    async def abort(self, request_id: str) -> int:
        await super().abort(request_id)
        return 1


class OneVersion(MockEngine):
    """Labels a whole choice with the version at its end."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        async for event in super().generate(request):
            if isinstance(event, ChoiceEvent) and event.policy_versions:
                event.policy_versions = [(event.policy_versions[-1][0], 0)]
            yield event


class BusyPause(MockEngine):
    """Says that it is paused, and goes on."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        return PauseReport(mode=mode, already_paused=False, kept=1)


class DeafWhilePaused(MockEngine):
    """Refuses requests while paused."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        if (await self.health()).state == "paused":
            raise EngineFailed("paused")
        async for event in super().generate(request):
            yield event


class StaleWeights(MockEngine):
    """Takes the version and keeps the weights."""

    async def apply_weights(self, staged: StagedWeights, *, version: str) -> None:
        await self.set_policy_version(version)


class Untouchable(MockEngine):
    """Says that it flushed, and did not."""

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        return FlushReport(reset=True)


class Saltless(MockEngine):
    """Takes a salt and does not use it."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        async for event in super().generate(msgspec.structs.replace(request, cache_salt=None)):
            yield event


class Silent(MockEngine):
    """Recomputes and does not say so."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        async for event in super().generate(request):
            if isinstance(event, EndEvent):
                event.served_by.recomputed = []
            yield event


class BaseAdapter(MockEngine):
    """Serves every adapter's requests from the base model."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        async for event in super().generate(msgspec.structs.replace(request, adapter=None)):
            yield event


class WholeRoutes(MockEngine):
    """Ignores the start of routes."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        sampling = msgspec.structs.replace(request.sampling, routed_experts_prompt_start=0)
        async for event in super().generate(msgspec.structs.replace(request, sampling=sampling)):
            yield event


class StaleTransfer(MockEngine):
    """Says a new version and goes on with the old weights."""

    def __init__(self, settings: MockSettings) -> None:
        super().__init__(msgspec.structs.replace(settings, transfer_backend="mock", step_s=0.001))
        self._core.replace_weights = lambda _, version: self._core.relabel(version)  # type: ignore[method-assign]


class Sleepless(MockEngine):
    """Serves while asleep."""

    def __init__(self, settings: MockSettings) -> None:
        super().__init__(msgspec.structs.replace(settings, sleep_mode=True))

    async def health(self) -> EngineHealth:
        return msgspec.structs.replace(await super().health(), state="ready")


BROKEN: list[tuple[type[MockEngine], str]] = [
    (SharedSeed, "choices_are_single_requests_with_seed_plus_index"),
    (Sixteen, "omitted_max_tokens_is_the_room_that_is_left"),
    (OddTopK, "no_top_k_has_four_spellings"),
    (Ignores, "what_cannot_be_served_is_refused"),
    (ForeignErrors, "what_cannot_be_served_is_refused"),
    (ForeignErrors, "a_bad_request_leaves_its_neighbour_alone"),
    (Chatty, "unary_costs_one_event_per_choice"),
    (Shifted, "a_stream_folds_to_the_unary_answer"),
    (Leaky, "closing_the_iterator_stops_the_work"),
    (LossyAbort, "an_abort_keeps_what_there_is"),
    (CountingAbort, "an_abort_keeps_what_there_is"),
    (OneVersion, "spans_say_which_version_made_which_token"),
    (BusyPause, "paused_is_idle_and_resume_goes_on"),
    (DeafWhilePaused, "queued_while_paused_is_served_after"),
    (StaleWeights, "an_update_changes_what_is_made"),
    (StaleWeights, "spans_say_which_version_made_which_token"),
    (Untouchable, "flushing_reports_what_it_did"),
    (Saltless, "salts_separate_caches"),
    (Saltless, "kv_events_tell_what_is_cached"),
    (Silent, "recomputed_rows_are_marked"),
    (BaseAdapter, "adapters_load_serve_and_go"),
    (WholeRoutes, "routes_begin_where_asked"),
    (StaleTransfer, "native_weights_take_effect"),
    (Sleepless, "an_engine_asleep_refuses_until_it_is_awake"),
]


def subject_of(kind: type[MockEngine], root: Path, settings: MockSettings = SETTINGS) -> Subject:
    files: dict[str, list[str]] = {"mock_weights.json": [], "adapter_config.json": []}
    for name, paths in files.items():
        for i in range(2):
            path = root / f"{name}-{i}"
            path.mkdir()
            (path / name).write_text(f'{{"seed": {i}}}')
            paths.append(str(path))
    weights, adapters = files.values()
    return Subject(engine=kind(settings), weights=weights, adapters=adapters, transfer=TRANSFER)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of broken engines may wait for what never comes."""
    monkeypatch.setattr("rollplane.testing.checks.subject.within.__kwdefaults__", {"seconds": 1.0})


@pytest.mark.parametrize(("kind", "name"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
async def test_a_broken_promise_is_caught(kind: type[MockEngine], name: str, tmp_path: Path) -> None:
    slow = msgspec.structs.replace(SETTINGS, step_s=0.01) if kind is Leaky else SETTINGS
    subject = subject_of(kind, tmp_path, slow)
    await subject.engine.start()
    try:
        with pytest.raises(CheckFailed, match=f"^{name}: "):
            await run_check(BY_NAME[name], subject)
    finally:
        await subject.engine.close()


@pytest.mark.parametrize("kind", ["routes_zero", "nan_logprob", "no_terminal", "mask_lacks_sampled", "foreign_error"])
async def test_a_broken_answer_is_caught(kind: Any, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, faults=(Fault(kind=kind, times=1000),))

    with pytest.raises(CheckFailed):
        await check_engine(lambda: subject_of(MockEngine, tmp_path, settings))


async def test_the_report_names_what_does_not_apply() -> None:
    report = await check_engine(lambda: Subject(engine=MockEngine()), checks=[BY_NAME["masks_are_the_support"]])

    assert report == Report(engine="mock", not_applicable={"masks_are_the_support": "it returns no sampling masks"})
    assert str(report).splitlines()[0] == "mock: 0 promises kept, 1 not applicable"


async def test_an_engine_that_outlives_its_close_is_caught() -> None:
    class Undead(MockEngine):
        async def close(self, *, grace_s: float = 0.0) -> None:
            return

    with pytest.raises(CheckFailed, match="a closed engine says that it is alive"):
        await check_engine(lambda: Subject(engine=Undead()), checks=[])


def test_every_check_says_its_promise() -> None:
    assert [name for name, check in BY_NAME.items() if not check.__doc__] == []
    assert len(BY_NAME) == len(CHECKS)


async def test_a_check_that_came_too_late_is_run_again() -> None:
    tries = 0

    async def late(_: Subject) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise MomentMissed("it was over")
        raise CheckFailed("broken")

    engine = MockEngine()
    await engine.start()
    try:
        with pytest.raises(CheckFailed, match=r"^late: broken$"):
            await run_check(late, Subject(engine=engine))
    finally:
        await engine.close()
    assert tries == 3


async def test_a_check_that_always_comes_too_late_does_not_apply() -> None:
    async def late(_: Subject) -> None:
        raise MomentMissed("it was over")

    engine = MockEngine()
    await engine.start()
    try:
        assert await run_check(late, Subject(engine=engine)) == "it was over"
    finally:
        await engine.close()
