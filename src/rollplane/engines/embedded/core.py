"""The step loop: prompts in chunks, one token for every running sequence, and the policy controls between steps.

Everything here runs in one thread. A step is one forward over the next token of every running sequence and a chunk of
prompts; of a model whose attention cannot mix the two it is a forward for each. Joining and leaving happen after a
forward. Results leave as `Emission`s. The controls (`abort`, `pause`, `resume`, `apply_weights`, ...) are called between
steps only.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rollplane.engines.embedded.adapter_reader import AdapterContents
from rollplane.engines.embedded.lora import AdapterSet
from rollplane.engines.embedded.model import CausalModel
from rollplane.engines.embedded.prompt_logprobs import PromptLogprobsBuilder
from rollplane.engines.embedded.results import Emission, read_ending, read_tokens
from rollplane.engines.embedded.sampler import RowControls, draw, rank_of
from rollplane.engines.embedded.scheduler import Chunk, Job, Scheduler, group_by_length
from rollplane.engines.embedded.sequence import Generation, LogitRules, Sequence, child_rng
from rollplane.engines.embedded.slots import DecodeCache, PrefillCache, SlotTable
from rollplane.engines.embedded.stops import StopMatcher
from rollplane.engines.embedded.support import Support
from rollplane.engines.embedded.weights import CheckpointLayout, LoadedCheckpoint
from rollplane.errors import Conflict, InvalidRequest, NotFound

PauseMode = Literal["keep", "wait", "abort"]

_STRICTNESS: Final[list[PauseMode]] = ["keep", "wait", "abort"]


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """Limits of the step loop.

    Args:
        max_slots: sequences that run at once.
        chunk_tokens: prompt tokens computed with one decode step.
        max_adapters, max_adapter_rank: LoRA adapters held at once, and their largest rank.
    """

    max_slots: int = 32
    chunk_tokens: int = 512
    max_adapters: int = 8
    max_adapter_rank: int = 64


class Core:
    """The engine without its surroundings.

    Args:
        model: what makes the logits.
        settings: limits.
        tokenizer: needed only by requests with stop strings.
        version: the policy version of the loaded weights.
    """

    def __init__(
        self,
        model: CausalModel,
        settings: CoreSettings | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        version: str = "initial",
    ) -> None:
        self.model = model
        self.settings = settings or CoreSettings()
        self.tokenizer = tokenizer
        self.version = version
        self.paused: PauseMode | None = None
        self.steps = 0
        self.prefilled = False
        """Whether the last step had prompt tokens to compute."""
        self.generated_tokens = 0
        self.layout = CheckpointLayout(model)
        self.adapters = AdapterSet(
            model.module, max_adapters=self.settings.max_adapters, max_rank=self.settings.max_adapter_rank
        )
        self.slots = SlotTable(model.shape, max_slots=self.settings.max_slots, dtype=model.dtype)
        self.scheduler = Scheduler(max_slots=self.settings.max_slots, chunk_tokens=self.settings.chunk_tokens)
        self._controls: tuple[int, RowControls] | None = None

    def __repr__(self) -> str:
        state = f"paused ({self.paused})" if self.paused else "stepping"
        return f"<Core {state} at {self.version!r}, {self.scheduler!r}>"

    @property
    def idle(self) -> bool:
        """A step would do nothing."""
        if self.paused in ("keep", "abort"):
            return True
        return not self.scheduler.busy and (self.paused is not None or not self.scheduler.waiting)

    @torch.inference_mode()
    def submit(self, request: Generation) -> None:
        """Queue a validated request.

        Raises:
            NotFound: the adapter is not loaded.
            InvalidRequest: stop strings without a tokenizer.
        """
        if request.adapter is not None and request.adapter not in self.adapters:
            raise NotFound(f"adapter {request.adapter!r} is not loaded", param="model")
        if request.stop and self.tokenizer is None:
            raise InvalidRequest(
                "stop strings need the model's tokenizer.json, which is missing; use stop_token_ids", param="stop"
            )
        builder = None
        if request.prompt_logprobs is not None:
            builder = PromptLogprobsBuilder(request.prompt, request.prompt_logprobs)
        sequences = [self._sequence(request, index, builder) for index in range(request.n)]
        self.slots.reserve_alternatives(request.alternatives)
        self.scheduler.add(Job(request, sequences))

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """The next token of every running sequence and a chunk of prompts; what came of them."""
        self.prefilled = False
        if self.idle:
            return []
        self.steps += 1
        emissions: list[Emission] = []
        decodes = self.scheduler.decodable
        if decodes and not self.model.fast:  # whose prompts have a forward of their own
            self._decode([])
            emissions = self._retire()
            decodes = False
        chunks = self.scheduler.plan()
        self.prefilled = bool(chunks)
        if decodes:
            self._decode(chunks)
        elif chunks:
            self._prefill(chunks)
        emissions += self._retire()
        return emissions + self._deltas()

    @torch.inference_mode()
    def abort(self, request_id: str | None) -> list[Emission]:
        """End a request (None: every one) with reason `abort` and all its tokens so far; [] for an unknown id."""
        jobs = self.scheduler.remove_waiting(request_id)
        partial = self.scheduler.partial
        if partial is not None and request_id in (None, partial.request.request_id):
            self.scheduler.partial = None
            jobs.append(partial)
        emissions = []
        for job in jobs:
            for sequence in job.sequences:
                sequence.finish_reason = "abort"
                emissions.append(self._emission(sequence))
        for sequence in self.scheduler.running:
            if request_id in (None, sequence.request.request_id):
                sequence.finish_reason = "abort"
        return emissions + self._retire()

    def pause(self, mode: PauseMode) -> list[Emission]:
        """Hold new work. keep: running sequences freeze. wait: they go on until `idle`. abort: they end now."""
        self.paused = mode
        self.scheduler.held = True
        return self.abort(None) if mode == "abort" else []

    def stricter_mode(self, mode: PauseMode) -> PauseMode:
        """The stricter of `mode` and the one in force: abort over wait over keep."""
        return max(mode, self.paused or "keep", key=_STRICTNESS.index)

    def resume(self) -> None:
        """Step again."""
        self.paused = None
        self.scheduler.held = False

    def clear_cache(self) -> int:
        """Drop the keys and values of everything kept; it is computed again before the next token. How many had some.

        Routes stay those that were captured with their tokens. The recomputed rows are reported.
        """
        touched = 0
        for sequence in self.scheduler.running:
            sequence.clear()
            touched += 1
        return touched + self._restart_partial()

    def load_adapter(self, name: str, contents: AdapterContents) -> Generator[None, None, None]:
        """Load an adapter in slices; see `AdapterSet.loading`."""
        slices = self.adapters.loading(name, contents, in_use=self._adapters_in_use)
        while True:
            with torch.inference_mode():
                try:
                    next(slices)
                except StopIteration:
                    return
            yield

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; an unknown name is no error.

        Raises:
            Conflict: a request still uses it.
        """
        users = sum(request.adapter == name for request in self.scheduler.requests())
        if users:
            raise Conflict(f"adapter {name!r} is used by {users} request(s)")
        self.adapters.unload(name)

    def apply_weights(self, checkpoint: LoadedCheckpoint, *, version: str) -> None:
        """Copy a checked checkpoint into the model's own parameters; the version changes last.

        A half computed prompt starts again, so that its first token is wholly the new version's, and so does what is
        computed again after `clear_cache`: no span would name the version between, which made no token.

        Raises:
            Conflict: not paused, or still draining.
        """
        if self.paused is None or not self.idle:
            raise Conflict(f"weights change only while paused and idle; this engine is {self!r}")
        self.layout.copy_in(checkpoint)
        self._restart_partial()
        for sequence in self.scheduler.running:
            if sequence.cleared_at == sequence.generated:
                sequence.clear()
        self.version = version

    def _adapters_in_use(self) -> set[str]:
        return {request.adapter for request in self.scheduler.requests() if request.adapter is not None}

    def _restart_partial(self) -> int:
        job = self.scheduler.partial
        if job is None or not job.computed:
            return 0
        job.computed = 0
        if builder := job.sequences[0].prompt_logprobs:
            builder.restart()
        return 1

    def _sequence(self, request: Generation, index: int, builder: PromptLogprobsBuilder | None) -> Sequence:
        eos_ids = frozenset() if request.ignore_eos else self.model.eos_token_ids
        return Sequence(
            request=request,
            index=index,
            rng=child_rng(request.seed, index),
            eos_ids=eos_ids,
            rules=LogitRules(request, vocab=self.model.shape.vocab_tokens, eos_ids=eos_ids)
            if LogitRules.needed(request)
            else None,
            matcher=StopMatcher(
                self.tokenizer,
                request.stop,
                min_tokens=request.min_tokens,
                skip_special_tokens=request.skip_special_tokens,
            )
            if request.stop and self.tokenizer is not None
            else None,
            prompt_logprobs=builder,
        )

    def _decode(self, chunks: list[Chunk]) -> None:
        """One token for every running sequence and, in the same forward, chunks of prompts (of a `fast` model only)."""
        running = self.scheduler.running
        batch = len(running)
        self._begin(chunks)
        positions = self.slots.lengths[:batch] - 1
        self.slots.reserve(slots=batch, tokens=int(positions.max()) + 2)
        cache = DecodeCache(self.slots, positions, [(c.slot, c.start, c.end) for c in chunks])
        visible = torch.arange(cache.keys)[None] <= positions[:, None]
        adapters = [s.request.adapter for s in running]
        for chunk in chunks:
            adapters += [chunk.adapter] * chunk.tokens
        with self.adapters.rows(adapters, tokens=1):
            out = self.model.forward(
                self.slots.tokens[cache.slots, cache.positions][:, None],
                positions=cache.positions[:, None],
                visible=visible[:, None],
                cache=cache,
                rows=_rows_with_logits(batch, chunks) if chunks else None,
            )
        if out.routes is not None:
            self.slots.routes[cache.slots, cache.positions] = out.routes[:, 0].to(torch.int16)
        for sequence in running:
            sequence.computed += 1
        parts = torch.split(out.logits[:, -1], [batch, *(c.logits for c in chunks)])
        first = self._count(dict(zip(chunks, parts[1:], strict=True)))
        logits = torch.cat((parts[0], torch.stack(first))) if first else parts[0]
        self._sample(logits, running, self.slots.rows[: len(running)])  # those that joined, too

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Compute chunks of prompts; sequences whose prompt is complete get their first token."""
        before = len(self.scheduler.running)
        self._begin(chunks)
        computed: dict[Chunk, Tensor] = {}
        for alike in group_by_length(chunks):
            computed.update(self._compute(alike))
        if first := self._count({chunk: computed[chunk] for chunk in chunks}):
            running = self.scheduler.running
            self._sample(torch.stack(first), running[before:], self.slots.rows[before : len(running)])

    def _count(self, computed: dict[Chunk, Tensor]) -> list[Tensor]:
        """Count computed chunks, with their logits [positions, V], in the order of their slots, which joining relies on.

        The sequences whose prompt is complete run; their logits [V], one for each.
        """
        first: list[Tensor] = []
        for chunk, logits in computed.items():
            if chunk.sequence is not None:
                chunk.sequence.recompute(chunk.end)
            if chunk.job is not None and self._advance(chunk.job, chunk, logits):
                first += [logits[-1]] * chunk.job.request.n
        return first

    def _compute(self, chunks: list[Chunk]) -> Iterator[tuple[Chunk, Tensor]]:
        """One forward over right-aligned chunks; each with the logits [positions, V] that were kept of it."""
        tokens = max(c.tokens for c in chunks)
        starts = torch.tensor([c.start for c in chunks])
        ends = torch.tensor([c.end for c in chunks])
        slots = torch.tensor([c.slot for c in chunks])
        positions = ends[:, None] - tokens + torch.arange(tokens)
        valid = positions >= starts[:, None]
        positions = positions.clamp(min=0)
        history = any(c.start for c in chunks)
        cache = PrefillCache(self.slots, slots=slots, valid=valid, positions=positions, history=history)
        visible = _visible(positions, valid, torch.arange(cache.keys) if history else None)
        with self.adapters.rows([c.adapter for c in chunks], tokens=tokens):
            out = self.model.forward(
                self.slots.tokens[slots[:, None], positions],
                positions=positions,
                visible=visible,
                cache=cache,
                every_position=any(c.job is not None and c.job.request.prompt_logprobs is not None for c in chunks),
            )
        for row, chunk in enumerate(chunks):
            size = chunk.tokens
            # A recomputed sequence keeps the routes that were captured with its tokens.
            if out.routes is not None and chunk.job is not None:
                self.slots.routes[chunk.slot, chunk.start : chunk.end] = out.routes[row, -size:].to(torch.int16)
            yield chunk, out.logits[row, -size:]

    def _begin(self, chunks: list[Chunk]) -> None:
        """Put the prompts that begin into their slots."""
        for chunk in chunks:
            if chunk.job is not None and not chunk.start:
                request = chunk.job.request
                self.slots.reserve(slots=chunk.slot + request.n, tokens=len(request.prompt) + 1)
                self.slots.begin(chunk.slot, torch.from_numpy(request.prompt.astype("int64")))

    def _advance(self, job: Job, chunk: Chunk, logits: Tensor) -> bool:
        """Count a computed chunk of a job's prompt; a complete one (True) is shared by its n sequences, which run."""
        if builder := job.sequences[0].prompt_logprobs:
            builder.add(logits, chunk.start)
        job.computed = chunk.end
        if chunk.end < len(job.request.prompt):
            return False
        self.scheduler.join(job)
        for sequence in job.sequences:
            sequence.computed = chunk.end
            if sequence.slot != job.slot:
                self.slots.move(job.slot, sequence.slot)
        return True

    def _sample(self, logits: Tensor, rows: list[Sequence], slots: Tensor) -> None:
        """Draw one token per row of logits [R, V] and write it, and what was asked about it, at the slots' ends."""
        logits = self._apply_rules(logits, rows)
        controls = self._row_controls(rows)
        support = Support(logits, controls)
        logprobs = support.logits.log_softmax(-1)
        uniforms = torch.tensor([s.rng.random() for s in rows], dtype=torch.float64)
        columns = draw(logprobs, uniforms, controls)[:, None]
        tokens = support.ids(columns)[:, 0]
        own = logprobs.gather(1, columns)
        lengths = self.slots.lengths.index_select(0, slots)
        at = (slots, lengths)
        self.slots.tokens[at] = tokens
        if any(s.request.logprobs is not None for s in rows):
            self.slots.logprobs[at] = own[:, 0]
            self.slots.ranks[at] = (logprobs > own).sum(-1, dtype=torch.int32).add_(1)
            self._keep_alternatives(support, logprobs, rows, at)
        if any(s.request.sampling_mask for s in rows):
            _keep_masks(support, tokens, rows)
        self.slots.lengths.index_copy_(0, slots, lengths + 1)
        self.generated_tokens += len(rows)
        finite = own[:, 0].isfinite().tolist()
        for sequence, token_id, usable in zip(rows, tokens.tolist(), finite, strict=True):
            sequence.accept(token_id, version=self.version)
            if not usable:
                sequence.finish_reason = "error"
                sequence.error = f"the log-probability of sampled token {sequence.generated - 1} is not finite"

    def _apply_rules(self, logits: Tensor, rows: list[Sequence]) -> Tensor:
        ruled = [(i, s) for i, s in enumerate(rows) if s.rules is not None]
        if ruled:
            logits = logits.clone()
        for i, sequence in ruled:
            if sequence.rules is not None:
                sequence.rules.apply(logits[i], generated=sequence.generated)
        return logits

    def _row_controls(self, rows: list[Sequence]) -> RowControls:
        vocab = self.model.shape.vocab_tokens
        if rows is not self.scheduler.running:
            return RowControls([s.request.controls for s in rows], vocab=vocab)
        if self._controls is None or self._controls[0] != self.scheduler.epoch:
            made = RowControls([s.request.controls for s in rows], vocab=vocab)
            self._controls = (self.scheduler.epoch, made)
        return self._controls[1]

    def _keep_alternatives(
        self, support: Support, logprobs: Tensor, rows: list[Sequence], at: tuple[Tensor, Tensor]
    ) -> None:
        width = max((s.request.logprobs or 0) for s in rows)
        if width:
            ids, values = support.topk(logprobs, width)
            self.slots.alt_ids[(*at, slice(width))] = ids.to(torch.int32)
            self.slots.alt_values[(*at, slice(width))] = values
            self.slots.alt_ranks[(*at, slice(width))] = torch.arange(1, width + 1, dtype=torch.int32)
        if any(s.request.logprob_token_ids for s in rows):
            logprobs = support.spread(logprobs)
        for row, sequence in enumerate(rows):
            if asked := sequence.request.logprob_token_ids:
                ids = torch.tensor(asked)
                values = logprobs[row : row + 1, ids]
                where = (at[0][row], at[1][row], slice(len(asked)))
                self.slots.alt_ids[where] = ids.to(torch.int32)
                self.slots.alt_values[where] = values[0]
                self.slots.alt_ranks[where] = rank_of(logprobs[row : row + 1], values)[0]

    def _retire(self) -> list[Emission]:
        """Report finished sequences and close the holes they leave."""
        finished = [s for s in self.scheduler.running if s.finish_reason is not None]
        emissions = [self._emission(s) for s in finished]
        for sequence in reversed(finished):
            if hole := self.scheduler.leave(sequence):
                self.slots.move(*hole)
        partial = self.scheduler.partial
        if partial is not None and partial.slot > len(self.scheduler.running):
            self.slots.move(partial.slot, len(self.scheduler.running))
            partial.slot = len(self.scheduler.running)
        return emissions

    def _deltas(self) -> list[Emission]:
        """New tokens of the streams that go on."""
        running = self.scheduler.running
        return [self._emission(s) for s in running if s.request.stream and s.generated > s.delivered]

    def _emission(self, sequence: Sequence) -> Emission:
        prompt_logprobs, floored_prompt = None, 0
        if sequence.prompt_logprobs is not None and sequence.generated:
            prompt_logprobs, floored_prompt = sequence.prompt_logprobs.take()
        ids, logprobs, floored = read_tokens(self.slots, sequence)
        ending = None
        if sequence.finish_reason is not None:
            ending = read_ending(self.slots, sequence, version=self.version)
        sequence.delivered = sequence.generated
        return Emission(
            sequence=sequence,
            token_ids=ids,
            logprobs=logprobs,
            floored=floored + floored_prompt,
            prompt_logprobs=prompt_logprobs,
            ending=ending,
        )


def _rows_with_logits(batch: int, chunks: list[Chunk]) -> Tensor:
    """Int64 [rows]: of a forward's `batch` next tokens, then its chunks' tokens, those whose logits are needed."""
    rows, end = list(range(batch)), batch
    for chunk in chunks:
        end += chunk.tokens
        rows += range(end - chunk.logits, end)
    return torch.tensor(rows)


def _visible(positions: Tensor, valid: Tensor, keys: Tensor | None) -> Tensor:
    """Bool [R, T, K], what each chunk token may attend to.

    Args:
        positions: int64 [R, T].
        valid: bool [R, T]; a padding token sees one key, so that no row is empty.
        keys: positions [K] of cached keys, or None where the keys are the chunk's own tokens.
    """
    if keys is not None:
        seen = keys[None, None] <= positions[:, :, None]
    else:
        seen = (positions[:, None, :] <= positions[:, :, None]) & valid[:, None, :]
    first = torch.zeros_like(seen)
    first[:, :, 0] = True
    return torch.where(valid[:, :, None], seen, first)


def _keep_masks(support: Support, tokens: Tensor, rows: list[Sequence]) -> None:
    """Append each row's surviving ids to the sequences that asked for them."""
    ids, counts = support.masks(tokens)
    begin = 0
    for sequence, count in zip(rows, counts, strict=True):
        if sequence.request.sampling_mask:
            sequence.mask_rows.append(ids[begin : begin + count])
        begin += count
