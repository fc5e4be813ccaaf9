"""Stop strings: incremental detokenisation, only for requests that have them."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollplane.errors import InvalidRequest


class StopMatcher:
    """Finds the first stop string in the text of one sequence's generated tokens.

    Text is what the tokenizer decodes from the completion alone, special tokens left out unless
    `skip_special_tokens` is False. A stop string may begin in an earlier token and end in this one.

    Args:
        tokenizer: the model's.
        stops: non-empty strings.
        min_tokens: a string counts only if it ends after this many tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], *, min_tokens: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._longest = max(len(s) for s in stops)
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._tail = ""
        self._count = 0

    def feed(self, token_id: int) -> str | None:
        """The stop string that this token completed, or None. Of several, the one that ends first."""
        self._count += 1
        piece = self._step(token_id)
        text = self._tail + piece
        fresh = len(self._tail)
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        if not piece or self._count <= self._min_tokens:
            return None
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, fresh - len(stop) + 1))
            if at >= 0 and (found is None or at + len(stop) < found[0]):
                found = (at + len(stop), stop)
        return found[1] if found else None

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # The decoder cannot extend its own earlier text (an id that rewrites it): start again from this token.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token_id) or ""


def load_tokenizer(directory: Path | None) -> Tokenizer | None:
    """The tokenizer beside the weights; None if the directory has no tokenizer.json.

    Raises:
        InvalidRequest: the file is there and cannot be read.
    """
    path = directory / "tokenizer.json" if directory is not None else None
    if path is None or not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise InvalidRequest(f"{path} could not be read: {error}") from error
