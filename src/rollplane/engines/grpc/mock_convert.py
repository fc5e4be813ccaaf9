"""The server's side of the wire, for the mock server: wire requests as ours, our events as wire answers."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from rollplane.engines.grpc.convert import MODALITIES, NO_TOP_K
from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.engines.grpc.struct_json import read_struct, write_struct
from rollplane.errors import InvalidRequest
from rollplane.protocol.artifacts import Alternatives, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent, PromptEvent
from rollplane.protocol.features import MediaItem
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.request import ContentPart, GenerateRequest, RequestOptions
from rollplane.protocol.sampling import SamplingParams, check_sampling

_NAMES: Final = {number: name for name, number in MODALITIES.items()}
_FINISH: Final = {
    "length": pb.FinishInfo.LENGTH,
    "stop": pb.FinishInfo.STOP,
    "repetition": pb.FinishInfo.STOP,
    "abort": pb.FinishInfo.ABORTED,
}
_UINT32: Final = 0xFFFF_FFFF


def from_wire(wire: pb.GenerateRequest, *, stream: bool) -> GenerateRequest:
    """The request a server understands, defaults as vllm-rs 0.31 has them (an omitted temperature is greedy).

    Raises:
        InvalidRequest: what vllm-rs refuses too.
    """
    if wire.WhichOneof("prompt") != "token_ids" or not wire.token_ids.ids:
        raise InvalidRequest("the prompt must be token ids")
    if wire.sampling.num_sequences > 1:
        raise InvalidRequest("num_sequences > 1 is not supported")
    ids = np.array(wire.token_ids.ids, dtype=np.int64)
    if int(ids.max()) > 2**31 - 1:
        raise InvalidRequest(f"token id {int(ids.max())} is out of vocabulary")
    params = SamplingParams(**_sampling(wire))
    check_sampling(params)
    return GenerateRequest(
        request_id=wire.request_id,
        token_ids=ids.astype(np.int32),
        sampling=params,
        stream=stream,
        cache_salt=wire.kv.cache_salt or None,
        priority=wire.priority,
        features=_features(wire, prompt_tokens=int(ids.size)) or None,
        content_parts=_raw_media(wire) or None,
        return_token_ids=wire.response.prompt_token_ids,
        kv_transfer_params=read_struct(wire.kv.kv_transfer_params) if wire.kv.HasField("kv_transfer_params") else None,
        ec_transfer_params=read_struct(wire.kv.ec_transfer_params) if wire.kv.HasField("ec_transfer_params") else None,
        options=RequestOptions(
            session_id=wire.session_id if wire.HasField("session_id") else None,
            routed_experts=False,
            sampling_mask=False,
        ),
        adapter=wire.lora_name or None,
    )


def _sampling(wire: pb.GenerateRequest) -> dict[str, Any]:
    sampling, decoding, stopping, response = wire.sampling, wire.decoding, wire.stopping, wire.response
    found: dict[str, Any] = {"temperature": wire.temperature if wire.HasField("temperature") else 0.0}
    if sampling.top_k not in (0, NO_TOP_K):
        found["top_k"] = sampling.top_k
    if sampling.HasField("seed"):
        found["seed"] = sampling.seed
    maybe: dict[str, Any] = {
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": decoding.presence_penalty,
        "frequency_penalty": decoding.frequency_penalty,
        "repetition_penalty": decoding.repetition_penalty,
        "logit_bias": dict(decoding.logit_bias),
        "allowed_token_ids": list(decoding.allowed_token_ids),
        "max_tokens": stopping.max_new_tokens,
        "min_tokens": stopping.min_new_tokens,
        "stop_token_ids": list(stopping.stop_token_ids),
        "stop": list(stopping.stop_strings),
        "ignore_eos": stopping.ignore_eos,
        "skip_reading_prefix_cache": wire.kv.bypass_prefix_cache,
    }
    found |= {name: value for name, value in maybe.items() if value}
    structure = decoding.WhichOneof("structured_output")
    if structure is not None:
        found["structured_outputs"] = {structure: True}
    if response.output_logprobs:
        found["logprobs"] = _count(response.output_candidates)
        if response.output_candidates.WhichOneof("select") == "token_ids":
            found["logprob_token_ids"] = list(response.output_candidates.token_ids.ids)
    if response.prompt_logprobs:
        found["prompt_logprobs"] = _count(response.prompt_candidates)
    return found


def _count(candidates: pb.CandidateTokens) -> int:
    kind = candidates.WhichOneof("select")
    return -1 if kind == "all" and candidates.all else candidates.top_n if kind == "top_n" else 0


def _features(wire: pb.GenerateRequest, *, prompt_tokens: int) -> list[MediaItem]:
    found = []
    for i, item in enumerate(wire.media):
        if item.WhichOneof("source") != "features":
            continue
        features, where = item.features, f"media[{i}].features"
        if item.modality not in _NAMES:
            raise InvalidRequest(f"media[{i}].modality is {item.modality}")
        if not features.HasField("kwargs") or not features.kwargs:
            raise InvalidRequest(f"{where}.kwargs is missing or empty")
        if not features.identifier:
            raise InvalidRequest(f"{where}.identifier is empty")
        if features.length == 0 or features.offset + features.length > prompt_tokens:
            raise InvalidRequest(
                f"{where}: [{features.offset}, {features.offset + features.length}) is no range of the prompt of "
                f"{prompt_tokens} tokens"
            )
        if features.is_embed and len(features.is_embed) != features.length:
            raise InvalidRequest(f"{where}.is_embed has {len(features.is_embed)} entries for {features.length}")
        found.append(
            MediaItem(
                modality=_NAMES[item.modality],
                producer_hash=features.identifier,
                offset=features.offset,
                length=features.length,
                is_embed=np.array(features.is_embed, dtype=np.bool_) if features.is_embed else None,
                kwargs=features.kwargs,
            )
        )
    return found


def _raw_media(wire: pb.GenerateRequest) -> list[ContentPart]:
    found = []
    for i, item in enumerate(wire.media):
        source = item.WhichOneof("source")
        if source == "features":
            continue
        if source is None or item.modality not in _NAMES:
            raise InvalidRequest(f"media[{i}] has no source or no modality")
        url = "data:" if source == "raw_bytes" else getattr(item, source)
        kind: Any = f"{_NAMES[item.modality]}_url"
        found.append(ContentPart(type=kind, url=url, uuid=item.uuid or None))
    return found


class AnswerWriter:
    """Our events of one request as wire messages.

    Args:
        wire: the request.
        info: the engine's facts.
        tokens_per_message: how a stream is cut; None: as the events come.
    """

    def __init__(self, wire: pb.GenerateRequest, info: EngineInfo, *, tokens_per_message: int | None) -> None:
        self._wire = wire
        self._info = info
        self._cut = tokens_per_message
        self._sent = 0

    def prompt(self, event: PromptEvent | None) -> pb.PromptInfo:
        """The prompt's part."""
        ids = self._wire.token_ids.ids
        out = pb.PromptInfo(num_prompt_tokens=len(ids) if event is None else event.prompt_tokens)
        if self._wire.response.prompt_token_ids:
            out.token_ids.extend(ids)
        logprobs = event.prompt_logprobs if event is not None else None
        if not self._wire.response.prompt_logprobs or logprobs is None:
            return out
        all_ids, values, ranks = logprobs.ids.tolist(), logprobs.values.tolist(), logprobs.ranks.tolist()
        offsets = logprobs.offsets.tolist()
        out.logprobs.append(0.0)
        out.ranks.append(0)
        out.candidate_tokens.add()
        for i in range(1, len(offsets) - 1):
            first, end = offsets[i], offsets[i + 1]
            out.logprobs.append(values[first])
            out.ranks.append(ranks[first])
            row = out.candidate_tokens.add()
            if self._wire.response.prompt_candidates.WhichOneof("select"):
                for at in range(first, end):
                    row.tokens.add(id=all_ids[at], logprob=values[at], rank=ranks[at])
        return out

    def choice(self, event: ChoiceEvent) -> Iterator[pb.SequenceOutput]:
        """The messages of new tokens; the finish is part of the last."""
        count = int(event.token_ids.size)
        step = self._cut or max(count, 1)
        firsts = range(0, count, step) if count else range(1 if event.finish_reason is not None else 0)
        for first in firsts:
            end = min(first + step, count)
            out = self._tokens(event, first, end)
            if end == count and event.finish_reason is not None:
                self._finish(out.finish_info, event)
            yield out

    def end(self, event: EndEvent, output: pb.SequenceOutput) -> None:
        """What the end of the request adds to its last output."""
        for name in ("kv_transfer_params", "ec_transfer_params"):
            params = getattr(event, name)
            if params is not None:
                getattr(output.finish_info, name).CopyFrom(write_struct(params, param=name))

    def _tokens(self, event: ChoiceEvent, first: int, end: int) -> pb.SequenceOutput:
        self._sent += end - first
        out = pb.SequenceOutput(index=event.index, num_tokens=end - first)
        if self._wire.response.output_token_ids:
            out.token_ids.extend(each & _UINT32 for each in event.token_ids[first:end].tolist())
        if event.logprobs is not None and self._wire.response.output_logprobs:
            self._logprobs(out, event.logprobs, first, end)
        return out

    def _logprobs(self, out: pb.SequenceOutput, logprobs: TokenLogprobs, first: int, end: int) -> None:
        out.logprobs.extend(logprobs.values[first:end].tolist())
        out.ranks.extend([1] * (end - first) if logprobs.ranks is None else logprobs.ranks[first:end].tolist())
        tops: Alternatives | None = logprobs.alternatives
        for position in range(first, end):
            row = out.candidate_tokens.add()
            if tops is not None:
                for at in range(int(tops.offsets[position]), int(tops.offsets[position + 1])):
                    row.tokens.add(id=int(tops.ids[at]), logprob=float(tops.values[at]), rank=int(tops.ranks[at]))

    def _finish(self, out: pb.FinishInfo, event: ChoiceEvent) -> None:
        out.num_output_tokens = self._sent
        if event.finish_reason is not None:
            out.finish_reason = _FINISH[event.finish_reason]
        if isinstance(event.stop_reason, int):
            out.stop_token_id = event.stop_reason
        elif isinstance(event.stop_reason, str):
            out.stop_string = event.stop_reason
        elif event.finish_reason == "stop" and self._info.eos_token_ids:
            out.eos_token_id = self._info.eos_token_ids[0]
