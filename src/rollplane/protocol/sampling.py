"""Sampling parameters as the wire carries them: omitted, null and a value are three things up to the engine.

Every field is `UNSET` where the caller left it out, None where the caller sent null, and a value otherwise; null means
omitted to the engine. The names are vLLM 0.31's public `SamplingParams`. Checks here need no engine; what depends on an
engine's vocabulary, widths and abilities is in `rollplane.admission`.
"""

import functools
import math
import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from rollplane.errors import InvalidRequest
from rollplane.protocol.arrays import INT32_MAX
from rollplane.protocol.opaque import check_opaque

Maybe = UnsetType | None

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024


class SamplingParams(
    msgspec.Struct, frozen=True, dict=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What a caller may set. Units: temperatures and penalties are dimensionless, counts are tokens."""

    n: int | Maybe = UNSET
    presence_penalty: float | Maybe = UNSET
    frequency_penalty: float | Maybe = UNSET
    repetition_penalty: float | Maybe = UNSET
    temperature: float | Maybe = UNSET
    top_p: float | Maybe = UNSET
    top_k: int | Maybe = UNSET
    min_p: float | Maybe = UNSET
    seed: int | Maybe = UNSET
    stop: str | list[str] | Maybe = UNSET
    stop_token_ids: list[int] | Maybe = UNSET
    ignore_eos: bool | Maybe = UNSET
    max_tokens: int | Maybe = UNSET
    min_tokens: int | Maybe = UNSET
    logprobs: int | Maybe = UNSET
    prompt_logprobs: int | Maybe = UNSET
    prompt_logprob_token_ids: list[int] | Maybe = UNSET
    prompt_logprob_start: int | Maybe = UNSET
    logprob_token_ids: list[int] | Maybe = UNSET
    flat_logprobs: bool | Maybe = UNSET
    detokenize: bool | Maybe = UNSET
    skip_special_tokens: bool | Maybe = UNSET
    spaces_between_special_tokens: bool | Maybe = UNSET
    include_stop_str_in_output: bool | Maybe = UNSET
    stream_interval: int | Maybe = UNSET
    structured_outputs: dict[str, Any] | Maybe = UNSET
    logit_bias: dict[int, float] | Maybe = UNSET
    allowed_token_ids: list[int] | Maybe = UNSET
    extra_args: dict[str, Any] | Maybe = UNSET
    bad_words: list[str] | Maybe = UNSET
    skip_reading_prefix_cache: bool | Maybe = UNSET
    thinking_token_budget: int | Maybe = UNSET
    repetition_detection: dict[str, Any] | Maybe = UNSET
    routed_experts_prompt_start: int | Maybe = UNSET
    watermarking: Any = UNSET

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or `default` where it was omitted or null."""
        return self._given.get(name, default)

    def given(self) -> dict[str, Any]:
        """The fields that hold a value (neither omitted nor null); not to be changed, for it is made once."""
        return self._given

    @functools.cached_property
    def _given(self) -> dict[str, Any]:
        fields = zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True)
        return {name: value for name, value in fields if value is not UNSET and value is not None}

    @property
    def top_k_limit(self) -> int:
        """The number of most likely tokens to keep; 0 = no top-k (absent, null, 0 and -1 are alike)."""
        return max(int(self.get("top_k", 0)), 0)

    @property
    def choices(self) -> int:
        """How many choices were asked for."""
        n = self.n
        return 1 if n is UNSET or n is None else n

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        stop = self.get("stop", [])
        return [stop] if isinstance(stop, str) else list(stop)

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p removes tokens from the support."""
        return self.top_k_limit > 0 or self.get("top_p", 1.0) < 1.0 or self.get("min_p", 0.0) > 0.0


_MSGSPEC_PATH: Final = re.compile(r"(.*) - at `(?:key` in `)?\$([^`]*)`", re.DOTALL)
"""A refusal of msgspec: its sentence and the path of the value (or of the object whose key it refuses)."""
_MSGSPEC_MEMBER: Final = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]*)`$")

FIELD_NAMES: Final[tuple[str, ...]] = SamplingParams.__struct_fields__
_KNOWN: Final = frozenset(FIELD_NAMES)

OPAQUE_FIELDS: Final = ("structured_outputs", "extra_args", "repetition_detection", "watermarking")
"""Handed on as they are, so only what JSON can say, and only so deep."""

ID_FIELDS: Final = (
    "stop_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
)
"""Fields that hold token ids (`logit_bias` as keys)."""

_CHECKED_ALONE: Final = frozenset({"top_p", "repetition_penalty", "min_tokens", "stop", "bad_words", *ID_FIELDS})
"""Fields that a range does not tell all about; few requests have one."""

_NUMBER_RANGES: Final[dict[str, tuple[float, float, str]]] = {
    "presence_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "frequency_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "temperature": (0.0, math.inf, ">= 0"),
    "min_p": (0.0, 1.0, "in [0, 1]"),
}
_COUNT_RANGES: Final[dict[str, tuple[int, int, str]]] = {
    "n": (1, 2**20, ">= 1"),
    "top_k": (-1, 2**31 - 1, ">= -1"),
    "seed": (INT64_MIN, INT64_MAX, "a 64-bit integer"),
    "max_tokens": (1, 2**31 - 1, ">= 1"),
    "min_tokens": (0, 2**31 - 1, ">= 0"),
    "logprobs": (-1, 2**31 - 1, ">= -1"),
    "prompt_logprobs": (-1, 2**31 - 1, ">= -1"),
    "prompt_logprob_start": (0, 2**31 - 1, ">= 0"),
    "stream_interval": (1, 2**31 - 1, ">= 1"),
    "thinking_token_budget": (0, 2**31 - 1, ">= 0"),
    "routed_experts_prompt_start": (0, 2**31 - 1, ">= 0"),
}


def parse_sampling(obj: dict[str, Any], *, drop_unknown: bool = False) -> SamplingParams:
    """Typed and checked sampling parameters from a decoded object (without the envelope's own keys).

    Args:
        obj: the caller's object; `vllm_xargs` is merged into `extra_args`, `output_kind: 2` and `return_token_ids: true`
            have no effect and are taken out.
        drop_unknown: leave out fields nobody knows instead of refusing them.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
    """
    fields = dict(obj)
    kind = fields.pop("output_kind", None)
    if kind is not None and not (type(kind) is int and kind == 2):
        _refuse("output_kind", f"must be 2 (final only) or absent, got {kind!r}; streaming is chosen with `stream`")
    ids = fields.pop("return_token_ids", None)
    if ids is not None and ids is not True:
        _refuse("return_token_ids", f"must be true or absent, got {ids!r}: token ids are what this route returns")
    xargs = fields.pop("vllm_xargs", None)
    if xargs is not None:
        fields["extra_args"] = _merge_extra_args(fields.get("extra_args"), xargs)
    unknown = [name for name in fields if name not in _KNOWN]
    if unknown:
        if not drop_unknown:
            name = unknown[0]
            raise InvalidRequest(
                f"sampling_params.{name} is not a sampling parameter of this server", param=f"sampling_params.{name}"
            )
        for name in unknown:
            del fields[name]
    for name in OPAQUE_FIELDS:
        if name in fields:
            check_opaque(fields[name], param=f"sampling_params.{name}")
    try:
        params = msgspec.convert(fields, SamplingParams, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid_from_msgspec(error, root="sampling_params") from None
    except RecursionError:
        raise InvalidRequest("sampling_params is nested too deeply", param="sampling_params") from None
    check_sampling(params)
    return params


def check_sampling(params: SamplingParams) -> None:
    """Refuse values that no engine can mean.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
    """
    given = params.given()
    for name, value in given.items():
        if name in _NUMBER_RANGES:
            low, high, says = _NUMBER_RANGES[name]
            if not (low <= value <= high and math.isfinite(value)):
                _refuse(name, f"must be {says}, got {value!r}")
        elif name in _COUNT_RANGES:
            least, most, says = _COUNT_RANGES[name]
            if not least <= value <= most:
                _refuse(name, f"must be {says}, got {value!r}")
    if _CHECKED_ALONE.isdisjoint(given):
        _check_seed(given.get("seed"), choices=params.choices)
        return
    top_p = given.get("top_p")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        _refuse("top_p", f"must be in (0, 1], got {top_p!r}")
    repetition = given.get("repetition_penalty")
    if repetition is not None and not (repetition > 0.0 and math.isfinite(repetition)):
        _refuse("repetition_penalty", f"must be > 0, got {repetition!r}")
    max_tokens, min_tokens = given.get("max_tokens"), given.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        _refuse("min_tokens", f"is {min_tokens}, over max_tokens {max_tokens}")
    _check_seed(given.get("seed"), choices=params.choices)
    for name in ID_FIELDS:
        ids = given.get(name)
        if ids and not (min(ids) >= 0 and max(ids) <= INT32_MAX):
            bad = next(x for x in ids if not 0 <= x <= INT32_MAX)
            _refuse(name, f"holds {bad}, outside [0, {INT32_MAX}]")
    for token_id, bias in given.get("logit_bias", {}).items():
        if not math.isfinite(bias):
            _refuse("logit_bias", f"of token {token_id} must be finite, got {bias!r}")
    if given.get("allowed_token_ids") == []:
        _refuse("allowed_token_ids", "must not be empty: no token could be sampled")
    _check_stop(params.stop_strings)
    for i, word in enumerate(given.get("bad_words", [])):
        if not word:
            _refuse(f"bad_words[{i}]", "must not be empty")


def _check_seed(seed: int | None, *, choices: int) -> None:
    if seed is not None and seed + choices - 1 > INT64_MAX:
        _refuse("seed", f"is {seed}: the seed of choice {choices - 1}, seed + index, is no 64-bit integer")


def _check_stop(stop: list[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        _refuse("stop", f"holds {len(stop)} strings, the limit is {MAX_STOP_STRINGS}")
    for i, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            _refuse(f"stop[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters, has {len(text)}")


def _merge_extra_args(extra: Any, xargs: Any) -> dict[str, Any]:
    if not isinstance(xargs, dict):
        _refuse("vllm_xargs", f"must be an object, got {type(xargs).__name__}")
    if extra is None:
        return dict(xargs)
    if not isinstance(extra, dict):
        _refuse("extra_args", f"must be an object, got {type(extra).__name__}")
    both = sorted(set(extra) & set(xargs))
    if both:
        _refuse("vllm_xargs", f"repeats {both[0]!r}, which extra_args has too")
    return {**extra, **xargs}


def _refuse(name: str, says: str) -> None:
    raise InvalidRequest(f"sampling_params.{name} {says}", param=f"sampling_params.{name}")


def invalid_from_msgspec(error: msgspec.ValidationError | msgspec.DecodeError, *, root: str) -> InvalidRequest:
    """Our error for a value that msgspec refused: its sentence, with the path rooted at the field's public name."""
    found = _MSGSPEC_PATH.fullmatch(str(error))
    text, where = (found[1], root + found[2]) if found else (str(error), root)
    member = _MSGSPEC_MEMBER.search(text)
    param = where if member is None else f"{where}.{member[1]}".removeprefix(".")
    return InvalidRequest(f"{where}: {text[:1].lower()}{text[1:]}", param=param)
