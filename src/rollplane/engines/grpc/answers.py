"""What a vLLM server answers, as events. Every promise of the wire is checked; a breach is an `EngineProtocolError`.

Numbers go straight from repeated fields, or from their packed bytes, into arrays.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from rollplane.engines.grpc.candidates import Candidates, read_candidates
from rollplane.engines.grpc.long_answers import LongAnswer
from rollplane.engines.grpc.packed import as_field
from rollplane.engines.grpc.proto import answers_pb2 as wire
from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.engines.grpc.struct_json import read_struct
from rollplane.errors import EngineProtocolError
from rollplane.protocol.arrays import Float32Array, Int32Array
from rollplane.protocol.artifacts import LOGPROB_FLOOR, Alternatives, PromptLogprobs, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, FinishReason, PromptEvent
from rollplane.protocol.features import MediaItem
from rollplane.protocol.invariants import is_one_each
from rollplane.protocol.request import GenerateRequest

_FINISH: Final[dict[int, FinishReason]] = {
    pb.FinishInfo.LENGTH: "length",
    pb.FinishInfo.STOP: "stop",
    pb.FinishInfo.ABORTED: "abort",
}
_FLOAT: Final = np.dtype("<f4")
_VALUES: Final = wire.Numbers.VALUES_FIELD_NUMBER
_PACKED: Final = {
    wire.SequenceOutput.LOGPROBS_FIELD_NUMBER: "logprobs",
    wire.SequenceOutput.RANKS_FIELD_NUMBER: "ranks",
}
"""Fields whose packed numbers were left undecoded; those that are not packed are unknown there."""


class AnswerReader:
    """Reads the messages of one wire call, which makes one choice.

    Args:
        request: what was asked.
        index: the choice this call makes.
    """

    def __init__(self, request: GenerateRequest, *, index: int = 0) -> None:
        params = request.sampling
        self.index = index
        self.tokens = 0
        self.floored = 0
        self.finished = False
        self.kv_transfer_params: dict[str, Any] | None = None
        self.ec_transfer_params: dict[str, Any] | None = None
        self._request = request
        self._prompt_seen = False
        count, ids = params.get("logprobs"), params.get("logprob_token_ids")
        self._logprobs = count is not None or bool(ids)
        self._alternatives = bool(count) or bool(ids)

    def __repr__(self) -> str:
        return f"<AnswerReader {self._request.request_id} choice {self.index}: {self.tokens} tokens{', finished' if self.finished else ''}>"

    def read(self, answer: wire.GenerateResponse | LongAnswer | None) -> tuple[PromptEvent | None, ChoiceEvent | None]:
        """The events of one message; None where it says nothing of the kind.

        Args:
            answer: None where protobuf could not read it, for so gRPC hands it on.

        Raises:
            EngineProtocolError: with the numbers.
        """
        if answer is None:
            self._breach("an answer that protobuf cannot read")
        if isinstance(answer, LongAnswer):
            prompt = None if answer.prompt_info is None else self._read_prompt(answer.prompt_info)
            return prompt, self._read_output(answer.output, answer.candidates)
        prompt = self._read_prompt(answer.prompt_info) if answer.HasField("prompt_info") else None
        if not answer.outputs:
            return prompt, None
        if len(answer.outputs) > 1:
            self._breach(f"a message with {len(answer.outputs)} outputs for one sequence")
        return prompt, self._read_output(answer.outputs[0])

    def end(self) -> None:
        """The call ended.

        Raises:
            EngineProtocolError: before the sequence finished, or without a word on the prompt.
        """
        if not self.finished:
            self._breach(f"the answer ended after {self.tokens} tokens without finish_info")
        if not self._prompt_seen:
            self._breach("the answer has no prompt_info")

    # -- output ------------------------------------------------------------------------------------------------------

    def _read_output(self, output: wire.SequenceOutput, candidates: Candidates | None = None) -> ChoiceEvent:
        """`candidates`: those that were read already."""
        if self.finished:
            self._breach("an output after finish_info")
        if output.index != 0:
            self._breach(f"an output with index {output.index} for one sequence")
        token_ids = int32s(output.token_ids)
        count = int(token_ids.size)
        if output.num_tokens != count:
            self._breach(f"num_tokens is {output.num_tokens}, token_ids has {count}")
        self.tokens += count
        event = ChoiceEvent(
            index=self.index,
            token_ids=token_ids,
            logprobs=self._read_logprobs(output, token_ids, candidates) if self._logprobs else None,
        )
        if output.HasField("finish_info"):
            self._read_finish(output.finish_info, event)
        return event

    def _read_logprobs(
        self, output: wire.SequenceOutput, token_ids: Int32Array, candidates: Candidates | None
    ) -> TokenLogprobs:
        count = int(token_ids.size)
        values, ranks = packed_float32s(output.logprobs), packed_int32s(output.ranks)
        if values.size != count:
            self._breach(f"{values.size} logprobs for {count} tokens")
        if ranks.size != count:
            self._breach(f"{ranks.size} ranks for {count} tokens")
        unknown = UnknownFieldSet(output)
        for i in range(len(unknown)):
            if (name := _PACKED.get(unknown[i].field_number)) is not None:
                self._breach(f"{name} that are not packed, beside {count} that are")
        alternatives = None
        if self._alternatives:
            rows = len(output.candidate_tokens) if candidates is None else candidates.offsets.size - 1
            if rows != count:
                self._breach(f"{rows} candidate_tokens for {count} tokens")
            ids, tops, top_ranks, offsets = candidates or read_candidates(output.candidate_tokens)
            if count and not is_one_each(offsets) and int(np.diff(offsets).min()) < 1:
                self._breach(f"token {int(np.diff(offsets).argmin())} has no candidate")
            self.floored += floor(tops)
            alternatives = Alternatives(ids=ids, values=tops, ranks=top_ranks, offsets=offsets)
        return TokenLogprobs(values=values, ranks=ranks, alternatives=alternatives)

    def _read_finish(self, finish: pb.FinishInfo, event: ChoiceEvent) -> None:
        reason = _FINISH.get(finish.finish_reason)
        if reason is None:
            self._breach(f"finish_info has the finish reason {finish.finish_reason}")
        if finish.num_output_tokens != self.tokens:
            self._breach(f"finish_info says {finish.num_output_tokens} output tokens, {self.tokens} came")
        self.finished = True
        event.finish_reason = reason
        kind = finish.WhichOneof("stop_reason")
        if kind in ("stop_token_id", "stop_string"):
            event.stop_reason = getattr(finish, kind)
        if finish.HasField("kv_transfer_params"):
            self.kv_transfer_params = read_struct(finish.kv_transfer_params)
        if finish.HasField("ec_transfer_params"):
            self.ec_transfer_params = read_struct(finish.ec_transfer_params)

    # -- prompt ------------------------------------------------------------------------------------------------------

    def _read_prompt(self, info: wire.PromptInfo) -> PromptEvent:
        request = self._request
        if self._prompt_seen:
            self._breach("prompt_info came twice")
        self._prompt_seen = True
        count = info.num_prompt_tokens
        expands = bool(request.content_parts)
        if count != request.prompt_tokens and not (expands and count >= request.prompt_tokens):
            self._breach(f"the prompt has {request.prompt_tokens} tokens, the engine says {count}")
        wants_logprobs = request.sampling.get("prompt_logprobs") is not None
        token_ids: Int32Array | None = None
        if request.return_token_ids or wants_logprobs:
            token_ids = int32s(info.token_ids)
            if token_ids.size != count:
                self._breach(f"prompt_info has {token_ids.size} token ids for {count} prompt tokens")
            if not expands and not np.array_equal(token_ids, request.token_ids):
                self._breach("the prompt's token ids are not those that were sent")
        event = PromptEvent(prompt_tokens=count)
        if request.return_token_ids:
            event.prompt_token_ids = token_ids
            event.mm_placeholders = placeholders(request.features) if request.features else None
        if wants_logprobs and token_ids is not None:
            event.prompt_logprobs = self._read_prompt_logprobs(info, token_ids)
        return event

    def _read_prompt_logprobs(self, info: wire.PromptInfo, token_ids: Int32Array) -> PromptLogprobs:
        """Rows of the prompt's own token, then the candidates without it; position 0 has no row."""
        count = int(token_ids.size)
        for name in ("logprobs", "ranks"):
            length = len(getattr(info, name))
            if length != count:
                self._breach(f"{length} prompt {name} for {count} prompt tokens")
        values, ranks = float32s(info.logprobs)[1:], int32s(info.ranks)[1:]
        self.floored += floor(values)
        if not self._request.sampling.get("prompt_logprobs"):
            offsets = np.arange(-1, count, dtype=np.int32)
            offsets[0] = 0
            return PromptLogprobs(ids=token_ids[1:], values=values, ranks=ranks, offsets=offsets)
        if len(info.candidate_tokens) != count:
            self._breach(f"{len(info.candidate_tokens)} prompt candidate_tokens for {count} prompt tokens")
        ids, tops, top_ranks, top_offsets = read_candidates(info.candidate_tokens)
        rows = np.repeat(np.arange(count), np.diff(top_offsets))
        keep = (ids != token_ids[rows]) & (rows > 0)
        self.floored += floor(tops)
        ids, tops, top_ranks, rows = ids[keep], tops[keep], top_ranks[keep], rows[keep]
        # The own tokens first, then a stable sort by row puts each in front of its row's candidates.
        order = np.argsort(np.concatenate([np.arange(1, count), rows]), kind="stable")
        counts = np.bincount(rows, minlength=count)
        counts[1:] += 1
        return PromptLogprobs(
            ids=np.concatenate([token_ids[1:], ids])[order],
            values=np.concatenate([values, tops])[order],
            ranks=np.concatenate([ranks, top_ranks])[order],
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        )

    def _breach(self, says: str) -> NoReturn:
        raise EngineProtocolError(f"request {self._request.request_id}, choice {self.index}: {says}")


def placeholders(items: list[MediaItem]) -> dict[str, list[dict[str, Any]]]:
    """Where processed media stand in the prompt: as sent, for nothing expands them."""
    out: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        place: dict[str, Any] = {"offset": item.offset, "length": item.length}
        if item.is_embed is not None:
            place["is_embed"] = item.is_embed.tolist()
        out.setdefault(item.modality, []).append(place)
    return out


def int32s(field: Any) -> Int32Array:
    """An int32 array, read-only, of a repeated uint32 field.

    Raises:
        EngineProtocolError: a number over int32.
    """
    values = field[:]
    try:
        data = struct.pack(f"{len(values)}i", *values)
    except struct.error:
        raise EngineProtocolError(f"the engine sent {max(values)}, which does not fit int32") from None
    return np.frombuffer(data, dtype=np.int32)


def float32s(field: Any) -> Float32Array:
    """A float32 array of a repeated float field."""
    return np.array(field[:], dtype=np.float32) if len(field) else np.empty(0, dtype=np.float32)


def packed_float32s(parts: Sequence[bytes]) -> Float32Array:
    """A float32 array, read-only, of a packed float field that was left undecoded.

    Raises:
        EngineProtocolError: it holds no whole floats.
    """
    data = b"".join(parts)
    if len(data) % _FLOAT.itemsize or (len(parts) > 1 and any(len(part) % _FLOAT.itemsize for part in parts)):
        raise EngineProtocolError(
            f"the engine sent packed floats of {' + '.join(f'{len(part)}' for part in parts)} bytes"
        )
    return np.frombuffer(data, dtype=_FLOAT)


def packed_int32s(parts: Sequence[bytes]) -> Int32Array:
    """An int32 array of a packed uint32 field that was left undecoded.

    Raises:
        EngineProtocolError: a number over int32, or no whole numbers.
    """
    data = b"".join(parts)
    if data.isascii():  # a byte each
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)
    try:
        return int32s(wire.Numbers.FromString(b"".join([as_field(part, number=_VALUES) for part in parts])).values)
    except DecodeError as error:
        raise EngineProtocolError(f"the engine sent packed numbers that cannot be read: {error}") from None


def floor(values: Float32Array) -> int:
    """Put the floor where a value is not finite or below it, in place; how many stand at it (vLLM floors some itself)."""
    if not values.size or (np.minimum.reduce(values) > LOGPROB_FLOOR and np.maximum.reduce(values) < np.inf):
        return 0  # a NaN anywhere is the least and the largest, and compares as false
    bad = ~(values > LOGPROB_FLOOR) | (values == np.inf)
    values[bad] = LOGPROB_FLOOR
    return int(np.count_nonzero(bad))
