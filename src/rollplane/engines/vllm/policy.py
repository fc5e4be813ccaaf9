"""The policy of one vLLM engine: pause, weight update, cache reset, with exact version spans.

Token counts are read while nothing steps. A pause's answer comes last on the socket that brings the tokens made before it,
and messages are processed in their order, so all of them are counted by then. A choice without
tokens at an update starts over (its vLLM request is replaced), so that its prompt's KV and first token are wholly the new
version's and under the new version's salt; one with tokens goes on with its own KV and gets a span.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from rollplane.engines.vllm import versions
from rollplane.engines.vllm.adapters import Adapters
from rollplane.engines.vllm.checkpoints import (
    Checkpoint,
    check_like,
    check_values,
    content_digest,
    read_checkpoint,
    unexpected_tensors,
)
from rollplane.engines.vllm.live import LiveChoice, LiveRequest
from rollplane.engines.vllm.versions import VllmApi
from rollplane.errors import Conflict, EngineDied, EngineFailed, InvalidRequest
from rollplane.identity import CacheScope
from rollplane.protocol.admin import (
    AllowTensors,
    FlushReport,
    PauseMode,
    PauseReport,
    ResumeReport,
    StagedWeights,
    mismatch_of,
)

Resubmit = Callable[[LiveRequest, LiveChoice], Awaitable[None]]


class Policy:
    """Which weights make tokens in one engine, and how they change.

    Args:
        live: the requests the engine runs, at any moment.
        resubmit: hands a choice to the engine again, under the present version.
        on_cleared: called when the prefix cache was dropped; an idle vLLM does not say so itself.
        isolate: cached KV is scoped by version through the salt; else an update makes kept requests recompute.
    """

    def __init__(
        self,
        engine: Any,
        api: VllmApi,
        *,
        version: str,
        loaded: Checkpoint | None,
        tied: bool,
        adapters: Adapters | None,
        isolate: bool,
        live: Callable[[], Iterable[LiveRequest]],
        resubmit: Resubmit,
        on_cleared: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.api = api
        self.version = version
        self.isolate = isolate
        self.running = asyncio.Event()
        self.running.set()
        self._held = False
        """Whether a caller's pause holds; a flush stops the steps for a moment without one."""
        self.broken: str | None = None
        self.transfer_open = False
        """Whether vLLM's own transfer is between the start and the end of an update: the model is no model then."""
        self._loaded = loaded
        self._good: StagedWeights | None = None
        self._tied = tied
        self._adapters = adapters
        self._live = live
        self._resubmit = resubmit
        self._on_cleared = on_cleared
        self._scope = CacheScope(version)
        self._lock = asyncio.Lock()
        if loaded is not None:
            self._good = StagedWeights(
                path=loaded.path,
                digest="",
                tensors=len(loaded.tensors),
                bytes=loaded.bytes,
                handle={"stamps": loaded.stamps, "skipped": []},
            )

    def __repr__(self) -> str:
        return f"<Policy {'running' if self.running.is_set() else 'paused'} at {self.version!r}>"

    @property
    def salt_scope(self) -> str | None:
        """What scopes the salt of what is submitted now; None without isolation."""
        return self._scope.current if self.isolate else None

    @property
    def paused(self) -> bool:
        """Whether nothing steps."""
        return not self.running.is_set()

    @property
    def good_path(self) -> str | None:
        """Where the weights in place came from: they are loaded again should the next ones fail half-way."""
        return self._good.path if self._good is not None else None

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        """See `WeightReceiver.pause`. New requests wait before vLLM in every mode."""
        was_held, self._held = self._held, True
        try:
            return await self._stop(mode, clear_cache=clear_cache)
        except (EngineDied, EngineFailed):
            self._held = was_held
            raise

    async def _stop(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        was_paused = self.paused
        self.running.clear()
        before = self._open()
        try:
            await self.ask(self.engine.pause_generation(mode=mode, clear_cache=clear_cache))
        except (EngineDied, EngineFailed):
            if not was_paused:
                self.running.set()
            raise
        left = [(live, choice) for live, choice in before if self._made(choice) is not None]
        if clear_cache:
            self._mark_cleared(left)
            self._on_cleared()
        ended = len({id(live) for live, _ in before} - {id(live) for live, _ in left})
        return PauseReport(
            mode=mode,
            already_paused=was_paused,
            kept=len({id(live) for live, _ in left}),
            aborted=ended if mode == "abort" else 0,
            drained=ended if mode == "wait" else 0,
            cleared=True if clear_cache else None,
        )

    async def resume(self) -> ResumeReport:
        """See `WeightReceiver.resume`."""
        async with self._lock:  # neither in the middle of an update nor of a flush
            self._held = False
            was_paused = self.paused
            await self._go()
            return ResumeReport(was_paused=was_paused, policy_version=self.version)

    async def _go(self) -> None:
        """Step again, unless a pause comes meanwhile: vLLM hears of it later, so it holds."""
        if not self.paused:
            return
        if self.broken is not None:
            raise EngineDied(f"the model's weights are broken: {self.broken}")
        if self.transfer_open:
            raise Conflict("a weight update is open; finish it before resuming")
        self._settle_cleared()
        await self.ask(self.engine.resume_generation())
        if not self._held:
            self.running.set()

    async def stage(
        self, path: str, *, allow_tensors: Sequence[AllowTensors] = (), param: str = "model_path"
    ) -> StagedWeights:
        """See `WeightReceiver.stage_weights`. The digest covers the bytes; the handle says which files they were, and which
        of their tensors are not read.

        Args:
            param: the field that errors name.

        Raises:
            InvalidRequest: also where missing tensors are to be allowed.
        """
        if "missing" in allow_tensors:
            raise InvalidRequest(
                "allow_tensors: missing tensors cannot be allowed on vLLM, which loads fused layers whole: one that lacks a "
                "part would be served as garbage",
                param="allow_tensors",
            )

        def read() -> StagedWeights:
            found = read_checkpoint(path)
            unexpected = self._unexpected(found) if "unexpected" in allow_tensors else []
            if unexpected:
                found = found.without(unexpected)
            self.check_fits(found, param=param)
            check_values(found, tied=self._tied, param=param)
            return StagedWeights(
                path=path,
                digest=content_digest(found),
                tensors=len(found.tensors),
                bytes=found.bytes,
                ignored=mismatch_of([], unexpected),
                handle={"stamps": found.stamps, "skipped": unexpected},
            )

        return await asyncio.to_thread(read)

    def _unexpected(self, checkpoint: Checkpoint) -> list[str]:
        if self._loaded is None:
            return []
        return unexpected_tensors(checkpoint, self._loaded, tied=self._tied)

    def check_fits(self, checkpoint: Checkpoint, *, param: str) -> None:
        """Hold a checkpoint's names, shapes and dtypes to the model.

        Raises:
            InvalidRequest: naming what does not fit.
        """
        if self._loaded is None:
            raise InvalidRequest(
                "the engine was not loaded from local safetensors files, so there is nothing to hold a checkpoint to",
                param=param,
            )
        check_like(checkpoint, self._loaded, tied=self._tied, param=param)

    async def apply(self, staged: StagedWeights, *, version: str) -> None:
        """See `WeightReceiver.apply_weights`."""
        if self.transfer_open:
            raise Conflict("a weight update by vLLM's own transfer is open; finish it first")
        await self.change(version, lambda: self._load(staged))

    async def change(self, version: str, load: Callable[[], Awaitable[None]]) -> None:
        """Other weights, with everything that hangs on them: caches, adapters, spans, and the version last.

        Args:
            load: puts them in place, or raises EngineFailed where the old ones are in place again.

        Raises:
            Conflict: not paused. EngineFailed: the old weights serve. EngineDied: the model is not whole.
        """
        async with self._lock:
            if not self.paused:
                raise Conflict(f"weights change only while paused; this engine is {self!r}")
            await self.check_adapters()
            known = not self.engine.errored
            counted = [
                (live, choice, made) for live, choice in self._open() if (made := self._made(choice)) is not None
            ]
            fresh = [(live, choice) for live, choice, made in counted if known and made == 0]
            kept = [(live, choice, made) for live, choice, made in counted if not known or made > 0]
            try:
                for _, choice in fresh:
                    await self.ask(versions.abort(self.engine, choice.leave()))
                await load()
                self.broken = None
                await self._drop_old_caches([(live, choice) for live, choice, _ in kept])
                await self._put_adapters_back()
                self.version = version
                self._scope.renew(version)
                for _, choice, made in kept:
                    choice.spans.change(version, made=made if known else None)
            except EngineFailed:
                await self._submit_again(fresh)
                raise
            except BaseException:
                for _, choice in fresh:
                    choice.fail(EngineFailed("a weight update failed before the request made a token"))
                raise
            await self._submit_again(fresh)

    async def go_back(self, why: str) -> None:
        """Load the old weights again over whatever is there.

        Raises:
            EngineFailed: they are in place. EngineDied: they are not, and nothing can step.
        """
        again = await self._load_files(self._good) if self._good is not None else [{}]
        if all("loaded" in answer for answer in again):
            await self._reset(running=True)
            await self._put_adapters_back()
            raise EngineFailed(f"{why}; the old weights were loaded again")
        self.broken = why
        raise EngineDied(f"{why}; nor did the old weights load again")

    async def check_adapters(self) -> None:
        """Whether a change of weights would leave every adapter; see `Adapters.check_files`."""
        if self._adapters is not None:
            await self._adapters.check_files()

    async def _put_adapters_back(self) -> None:
        """After a change of weights. A kept request whose adapter is lost ends: vLLM would load it itself, and end."""
        lost = await self._adapters.load_again() if self._adapters is not None else []
        for live, choice in self._open() if lost else []:
            if live.request.adapter in lost:
                await self.ask(versions.abort(self.engine, choice.leave()))
                choice.fail(EngineFailed(f"adapter {live.request.adapter!r} was lost with a change of weights"))

    def forget_good(self) -> None:
        """The weights in place came from nowhere that they could be loaded from again."""
        self._good = None

    def relabel(self, version: str) -> None:
        """Another name for the weights in place; running requests keep the name they have."""
        if version != self.version:
            self.version = version
            self._scope.renew(version)

    async def flush(self, *, preempt: bool = False) -> FlushReport:
        """See `WeightReceiver.flush_cache`."""
        if await self._reset(running=False):
            return FlushReport(reset=True)
        if not preempt:
            return FlushReport(reset=False, reason=f"{len(self._open())} running sequence(s) hold cached blocks")
        async with self._lock:
            stopped = not self.paused
            if stopped:
                await self._stop("keep")
            try:
                held = [(live, choice) for live, choice in self._open() if self._made(choice) is not None]
                reset = await self._reset(running=True)
                if reset:
                    self._mark_cleared(held)
                return FlushReport(
                    reset=reset,
                    preempted=len(held) if reset else 0,
                    reason=None if reset else "the engine could not take the blocks of running sequences",
                )
            finally:
                if stopped and not self._held:  # a caller that paused meanwhile keeps it
                    await self._go()

    # -----------------------------------------------------------------------------------------------------------------

    async def _load(self, staged: StagedWeights) -> None:
        """Put the files in place on every rank, or leave the old weights as they were.

        Raises:
            EngineFailed: the old weights serve. EngineDied: the model is not whole.
        """
        answers = await self._load_files(staged)
        refused = [answer["refused"] for answer in answers if "refused" in answer]
        if refused and len(refused) == len(answers):
            raise EngineFailed(f"the engine refuses the checkpoint: {refused[0]}")
        broken = [a.get("broken") or a["refused"] for a in answers if "loaded" not in a]
        if not broken:
            self._good = staged
            return
        await self.go_back(f"the checkpoint did not load: {broken[0]}")

    async def _load_files(self, staged: StagedWeights) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = await self.ask(
            self.engine.collective_rpc("rollplane_load_weights", kwargs={"path": staged.path, **staged.handle})
        )
        return answers

    async def _drop_old_caches(self, kept: list[tuple[LiveRequest, LiveChoice]]) -> None:
        """Nothing that the old weights computed may serve a request of the new version.

        Blocks that kept requests hold stay where new requests have another salt, and so cannot find them. Not so if one
        was to be computed again and made no token since: no span would name the version that it was computed under.
        """
        unnamed = any(c.recomputed_at is not None and c.recomputed_at == self._made(c) for _, c in kept)
        if not unnamed and (await self._reset(running=False) or self.isolate):
            return
        if not await self._reset(running=True):
            raise EngineDied("the engine keeps KV of the old weights that new requests would use")
        self._mark_cleared(kept)

    async def _reset(self, *, running: bool) -> bool:
        """Drop encoder, processor and prefix caches; whether the prefix cache could be dropped whole.

        vLLM's encoder and processor caches must not go while a prompt is being computed from them.
        """
        if running or self.paused or not self._open():
            await self.ask(self.engine.reset_mm_cache())
            await self.ask(self.engine.reset_encoder_cache())
        reset: bool = await self.ask(self.engine.reset_prefix_cache(reset_running_requests=running))
        if reset:
            self._on_cleared()
        return reset

    async def _submit_again(self, choices: list[tuple[LiveRequest, LiveChoice]]) -> None:
        for live, choice in choices:
            try:
                await self._resubmit(live, choice)
            except Exception as error:  # the reader must hear of it, whatever it is
                choice.fail(error)

    async def ask(self, call: Awaitable[Any]) -> Any:
        """Await a call to the engine; its failure as ours."""
        try:
            return await call
        except self.api.DeadError as error:
            raise EngineDied("the vLLM engine is gone") from error
        except Exception as error:  # what a worker raises arrives as a plain Exception with its text
            if self.engine.errored:
                raise EngineDied("the vLLM engine is gone") from error
            raise EngineFailed(f"vLLM refuses: {error}") from error

    def _open(self) -> list[tuple[LiveRequest, LiveChoice]]:
        return [(live, choice) for live in self._live() for choice in live.open_choices]

    def _made(self, choice: LiveChoice) -> int | None:
        return versions.output_tokens(self.engine, choice.collector)

    def _mark_cleared(self, choices: list[tuple[LiveRequest, LiveChoice]]) -> None:
        """These choices' KV is computed again at resume; remember how far it went."""
        for _, choice in choices:
            choice.cleared_at = self._made(choice)

    def _settle_cleared(self) -> None:
        """At resume: what was dropped of a choice with tokens is computed again, under the weights of now."""
        for live, choice in self._open():
            made, choice.cleared_at = choice.cleared_at, None
            if made:
                choice.recomputed_at = made
                live.recomputed_rows = max(live.recomputed_rows, live.prompt_tokens + made - 1)
