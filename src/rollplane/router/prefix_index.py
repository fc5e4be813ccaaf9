"""Which worker caches which prefix: what workers said of their blocks, and what was just sent to them. Pure.

A key names a block and everything before it (`identity.chained_keys`), so the leading keys of a prompt that a worker has
are the tokens that it need not compute. Keys are chained from the token ids in events; an engine's own block hashes only
name what it removes later. Each key maps to a bit mask of workers, so one walk over a prompt's keys answers for all.

What is predicted (a prompt was routed, its blocks are not reported yet) counts like what is reported and expires by
itself after one to two times `predicted_s`. Everything of a worker is forgotten in constant time by giving it a new bit;
what stays behind is swept up a little with every later call.
"""

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from rollplane.errors import Conflict, EngineProtocolError, InvalidRequest
from rollplane.identity import chained_keys, scope_key
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, KvBatch, KvEvent

CAPACITY_BLOCKS: Final = 2**20
"""Reported blocks of all workers together; about 300 bytes each."""
PREDICTED_S: Final = 30.0
SWEPT_PER_CALL: Final = 256
LOOKED_UP_AT_ONCE: Final = 128
"""Keys of a prompt that are looked up before it is seen whether any worker is left."""
MASKS_KEPT: Final = 1024
EVICTED_SHARE: Final = 64
"""One part in so many is evicted at once when the index is full."""


class IndexSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much an index holds. `blocks`: reported, over all workers. `forgotten`: of workers that were dropped, not swept
    up yet. `predicted`: keys routed and not reported. `orphans`: blocks left out because their parent is unknown.
    `evicted`: blocks dropped for room. `stale`: batches left out because they were of an older generation.
    """

    blocks: int
    forgotten: int
    predicted: int
    orphans: int
    evicted: int
    stale: int


class _Holder:
    """One worker's part: its bit, its blocks (engine hash -> key, oldest first) and what is predicted for it."""

    __slots__ = ("bit", "blocks", "generation", "instance", "pending_new", "pending_old", "rotations")

    def __init__(self, bit: int, *, instance: str = "", generation: int = 0) -> None:
        self.bit = bit
        self.blocks: dict[int, int] = {}
        self.instance = instance
        self.generation = generation
        self.pending_new = 0
        self.pending_old = 0
        self.rotations = 0


class PrefixIndex:
    """Blocks of many workers by key.

    Args:
        block_tokens: tokens per block; a worker with another size is refused.
        capacity_blocks: most reported blocks over all workers; the oldest of the worker with most go first.
        predicted_s: how long a prediction holds at least.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        capacity_blocks: int = CAPACITY_BLOCKS,
        predicted_s: float = PREDICTED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self.predicted_s = predicted_s
        self._clock = clock
        self._holders: dict[str, _Holder] = {}
        self._names: dict[int, str] = {}
        self._masks: dict[int, list[str]] = {}
        self._live = 0
        self._forgotten: list[_Holder] = []
        self._free_bits: list[int] = []
        self._next_bit = 0
        self._reported: dict[int, int] = {}
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._rotate_at = clock() + predicted_s
        self._blocks = 0
        self._awaited: dict[str, None] = {}
        """The workers that may have blocks to report."""
        self._orphans = 0
        self._evicted = 0
        self._stale = 0

    def __repr__(self) -> str:
        return (
            f"<PrefixIndex {self._blocks}/{self.capacity_blocks} blocks of {self.block_tokens} tokens on "
            f"{len(self._holders)} workers, {len(self._new) + len(self._old)} predicted>"
        )

    @property
    def sizes(self) -> IndexSizes:
        """How much there is."""
        forgotten = sum(len(holder.blocks) for holder in self._forgotten)
        return IndexSizes(
            blocks=self._blocks - forgotten,
            forgotten=forgotten,
            predicted=len(self._new) + len(self._old),
            orphans=self._orphans,
            evicted=self._evicted,
            stale=self._stale,
        )

    @property
    def worker_count(self) -> int:
        """How many workers it knows."""
        return len(self._holders)

    def blocks_of(self, worker: str) -> int:
        """Reported blocks of one worker."""
        holder = self._holders.get(worker)
        return 0 if holder is None else len(holder.blocks)

    def observe(self, worker: str, *, instance: str, generation: int) -> None:
        """A worker's state as it was told: another process or a newer generation drops what is known of it."""
        holder = self._holders.get(worker)
        if holder is None:
            self._add(worker, instance=instance, generation=generation)
        elif holder.instance != instance or generation > holder.generation:
            self._forget(worker)
            self._add(worker, instance=instance, generation=generation)

    def drop_worker(self, worker: str) -> None:
        """Forget everything of a worker; it stays one whose events are taken."""
        holder = self._holders.get(worker)
        if holder is not None:
            self._forget(worker)
            self._add(worker, instance=holder.instance, generation=holder.generation)

    def remove_worker(self, worker: str) -> None:
        """A worker is gone."""
        if worker in self._holders:
            self._forget(worker)

    def apply(self, worker: str, batch: KvBatch) -> None:
        """Take in what a worker said. A batch of an older generation is left out.

        Raises:
            Conflict: the worker is not observed, or the batch is of another process of it.
            InvalidRequest: its blocks have another size than this index; nothing of it is kept.
            EngineProtocolError: an event contradicts itself; with the numbers.
        """
        holder = self._holders.get(worker)
        if holder is None or holder.instance != batch.instance:
            raise Conflict(f"KV events of {worker} are of process {batch.instance}, which its state does not name")
        if batch.generation < holder.generation:
            self._stale += 1
            return
        self.observe(worker, instance=batch.instance, generation=batch.generation)
        self.apply_events(worker, batch.events)

    def apply_events(self, worker: str, events: Sequence[KvEvent]) -> None:
        """Take in events of an observed worker, in order; see `apply`."""
        self._tend()
        for event in events:
            holder = self._holders[worker]
            if isinstance(event, BlocksStored):
                self._store(worker, holder, event)
            elif isinstance(event, BlocksRemoved):
                self._remove(holder, event.hashes)
            else:
                self.drop_worker(worker)
        if self._blocks > self.capacity_blocks:
            self._evict()

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """How many leading keys each worker has, reported or predicted; only workers that have at least one, who has fewest first."""
        self._tend()
        alive = self._live
        depths: dict[str, int] = {}
        depth = 0
        masks = [found.get for found in (self._reported, self._new, self._old) if found]
        for at in range(0, len(keys) if masks else 0, LOOKED_UP_AT_ONCE):
            part = keys[at : at + LOOKED_UP_AT_ONCE]
            rows: list[Iterator[int]] = [map(mask, part, itertools.repeat(0)) for mask in masks]
            have = functools.reduce(_either, rows)
            # Workers change along a prompt a few times at most: a step of Python for each run of keys, not for each key.
            for workers, run in itertools.groupby(have):
                has = workers & alive
                if has != alive:
                    if depth:
                        self._note(alive ^ has, depth, depths)
                    alive = has
                    if not alive:
                        return depths
                depth += len(list(run))
        if depth:
            self._note(alive, depth, depths)
        return depths

    def reported(self, worker: str, keys: Iterable[int]) -> list[int]:
        """Those of some keys whose blocks a worker has said that it has."""
        holder = self._holders.get(worker)
        if holder is None:
            return []
        bit, reported = holder.bit, self._reported.get
        return [key for key in keys if reported(key, 0) & bit]

    def unreported(self, worker: str, keys: Sequence[int]) -> Sequence[int]:
        """The keys from the first one on that a worker has not said it has."""
        holder = self._holders.get(worker)
        if holder is None:
            return keys
        bit, reported = holder.bit, self._reported.get
        for at, key in enumerate(keys):
            if not reported(key, 0) & bit:
                return keys[at:]
        return ()

    def predict(self, worker: str, keys: Sequence[int], *, depth: int = 0) -> None:
        """A prompt with these keys was routed to a worker: it will have them unless it says otherwise.

        `depth`: how many leading keys it has already, as `match` said; they are looked at only where what is predicted of
        them is about to expire.
        """
        holder = self._holders.get(worker)
        if holder is None:
            return
        bit = holder.bit
        reported, new, old = self._reported, self._new, self._old
        if depth and old.get(keys[depth - 1], 0) & bit:
            depth = 0
        tail = keys[depth:] if depth else keys
        self._awaited[worker] = None
        if tail and not any(tail[0] in known for known in (new, reported, old)):
            # Nobody has the first, so nobody can use the others: whatever is left of them may be written over.
            for key in tail:
                new[key] = bit
            holder.pending_new += len(tail)
            tail = ()
        for key in tail:
            if reported.get(key, 0) & bit:
                continue
            known = new.get(key, 0)
            if known & bit:
                continue
            new[key] = known | bit
            holder.pending_new += 1
            if old.get(key, 0) & bit:
                _clear(old, key, bit)
                holder.pending_old -= 1
        if len(new) > self.capacity_blocks // 4:
            self._rotate()

    def assume(self, worker: str, keys: Sequence[int]) -> None:
        """A worker that says no events has computed a prompt with these keys: it is taken to have them."""
        holder = self._holders.get(worker)
        if holder is None:
            return
        before = len(holder.blocks)
        self._put(holder, keys, keys)
        self._blocks += len(holder.blocks) - before
        if self._blocks > self.capacity_blocks:
            self._evict()

    def pending_tokens(self) -> dict[str, int]:
        """Prompt tokens routed to a worker whose blocks it has not reported: roughly what it still computes. By worker, without
        those that have none.
        """
        size, found = self.block_tokens, {}
        for name in list(self._awaited):
            holder = self._holders.get(name)
            blocks = 0 if holder is None else holder.pending_new + holder.pending_old
            if blocks:
                found[name] = blocks * size
            else:
                del self._awaited[name]
        return found

    # -- events ----------------------------------------------------------------------------------------------------

    def _store(self, worker: str, holder: _Holder, event: BlocksStored) -> None:
        if event.block_tokens != self.block_tokens:
            self.drop_worker(worker)
            raise InvalidRequest(
                f"worker {worker} caches blocks of {event.block_tokens} tokens, this index has blocks of "
                f"{self.block_tokens}: its prefixes cannot be compared"
            )
        if event.token_ids.size != len(event.hashes) * self.block_tokens:
            raise EngineProtocolError(
                f"worker {worker} stored {len(event.hashes)} blocks of {self.block_tokens} tokens with "
                f"{event.token_ids.size} token ids"
            )
        if event.parent is None:
            parent = scope_key(salt=event.salt, adapter=event.adapter)
        else:
            known = holder.blocks.get(event.parent)
            if known is None:
                self._orphans += len(event.hashes)
                return
            parent = known
        keys = chained_keys(event.token_ids, block_tokens=self.block_tokens, parent=parent)
        before = len(holder.blocks)
        self._put(holder, event.hashes, keys)
        self._blocks += len(holder.blocks) - before

    def _put(self, holder: _Holder, hashes: Sequence[int], keys: Sequence[int]) -> None:
        blocks, bit, reported = holder.blocks, holder.bit, self._reported
        # Children first: the oldest are evicted first, and a chain is best cut from its end.
        for name, key in zip(reversed(hashes), reversed(keys), strict=True):
            blocks[name] = key
            has = reported.get(key, 0)
            if not has & bit:
                reported[key] = has | bit
                self._settle(holder, key)

    def _settle(self, holder: _Holder, key: int) -> None:
        """A prediction came true."""
        has = self._new.get(key, 0)
        if has & holder.bit:
            _clear(self._new, key, holder.bit)
            holder.pending_new -= 1
        has = self._old.get(key, 0)
        if has & holder.bit:
            _clear(self._old, key, holder.bit)
            holder.pending_old -= 1

    def _remove(self, holder: _Holder, hashes: Sequence[int]) -> None:
        for name in hashes:
            key = holder.blocks.pop(name, None)
            if key is not None:
                self._blocks -= 1
                _clear(self._reported, key, holder.bit)

    # -- workers and bits ------------------------------------------------------------------------------------------

    def _add(self, worker: str, *, instance: str, generation: int) -> None:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._next_bit
            self._next_bit += 1
        self._holders[worker] = _Holder(bit, instance=instance, generation=generation)
        self._names[bit] = worker
        self._masks.clear()
        self._live |= bit

    def _forget(self, worker: str) -> None:
        holder = self._holders.pop(worker)
        del self._names[holder.bit]
        self._masks.clear()
        self._live ^= holder.bit
        self._forgotten.append(holder)

    def _note(self, bits: int, depth: int, depths: dict[str, int]) -> None:
        if bits:
            depths.update(dict.fromkeys(self._named(bits), depth))

    def _named(self, bits: int) -> list[str]:
        """The workers of a mask; the same few masks are asked for again and again."""
        known = self._masks.get(bits)
        if known is None:
            if len(self._masks) >= MASKS_KEPT:
                self._masks.clear()
            known = self._masks[bits] = []
            while bits:
                bit = bits & -bits
                known.append(self._names[bit])
                bits ^= bit
        return known

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def _tend(self) -> None:
        """Let predictions expire, and sweep up some of what was forgotten."""
        now = self._clock()
        if now >= self._rotate_at:
            if now >= self._rotate_at + self.predicted_s:
                self._rotate()
            self._rotate()
        if self._forgotten:
            self._sweep()

    def _rotate(self) -> None:
        """What was predicted last becomes old, what was old is gone."""
        self._old, self._new = self._new, {}
        for holder in self._holders.values():
            holder.pending_old, holder.pending_new = holder.pending_new, 0
        for holder in self._forgotten:
            holder.rotations += 1
        self._rotate_at = self._clock() + self.predicted_s

    def _sweep(self) -> None:
        left = SWEPT_PER_CALL
        for holder in self._forgotten:
            while holder.blocks and left:
                _, key = holder.blocks.popitem()
                _clear(self._reported, key, holder.bit)
                self._blocks -= 1
                left -= 1
            if not left:
                break
        # A bit is free once nothing bears it: its blocks are swept up and the predictions of its time are gone.
        done = [holder for holder in self._forgotten if not holder.blocks and holder.rotations >= 2]
        for holder in done:
            self._forgotten.remove(holder)
            self._free_bits.append(holder.bit)

    def _evict(self) -> None:
        for holder in self._forgotten:
            self._blocks -= len(holder.blocks)
            for key in holder.blocks.values():
                _clear(self._reported, key, holder.bit)
            holder.blocks.clear()
        if self._blocks <= self.capacity_blocks:
            return
        goal = self.capacity_blocks - self.capacity_blocks // EVICTED_SHARE
        while self._blocks > goal:
            holder = max(self._holders.values(), key=lambda one: len(one.blocks))
            share = max(len(holder.blocks) // EVICTED_SHARE, 1)
            names = [name for name, _ in zip(holder.blocks, range(min(share, self._blocks - goal)), strict=False)]
            self._remove(holder, names)
            self._evicted += len(names)


def _either(these: Iterator[int], those: Iterator[int]) -> Iterator[int]:
    return map(operator.or_, these, those)


def _clear(masks: dict[int, int], key: int, bit: int) -> None:
    left = masks.get(key, 0) & ~bit
    if left:
        masks[key] = left
    else:
        masks.pop(key, None)
