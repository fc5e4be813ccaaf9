"""Text for the evaluation routes: the model's tokenizer and chat template, from one directory.

Rollouts never come here: they are token ids in both directions. A tokenizer that was named is read at the start; one that
is merely there, when the first request needs it, off the event loop: its libraries take seconds and 250 MB. The
directory's own files only, and no code of theirs.
"""

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from rollplane.errors import InvalidRequest
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.request import ContentPart

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE: Final = "tokenizer.json"
_MEDIA: Final = {"image_url": "image", "audio_url": "audio", "video_url": "video"}


def text_directory(*candidates: str | None) -> Path | None:
    """The first of these directories that holds a tokenizer."""
    found = (Path(each) for each in candidates if each is not None)
    return next((path for path in found if (path / TOKENIZER_FILE).is_file()), None)


def named_texts(directory: str | None) -> "Texts | None":
    """The text model of the directory that `server.tokenizer` names, not read yet; None where that names none.

    Raises:
        InvalidRequest: no tokenizer is there.
    """
    if directory is None:
        return None
    found = text_directory(directory)
    if found is None:
        raise InvalidRequest(f"server.tokenizer: {directory} has no {TOKENIZER_FILE}", param="server.tokenizer")
    return Texts(found, named=True)


class TextModel:
    """A tokenizer with its chat template.

    Args:
        directory: with `tokenizer.json` and, for chats, a template as transformers reads it.

    Raises:
        InvalidRequest: the files cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise InvalidRequest(
                "text needs the transformers package beside this server, which is not installed"
            ) from None
        try:
            self._whole: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
            self._tokenizer: Tokenizer = self._whole.backend_tokenizer
        except Exception as error:
            raise InvalidRequest(f"the tokenizer in {directory} could not be read: {error}") from error
        self.directory = directory
        self._pieces: dict[int, str] = {}
        taken = inspect.signature(self._whole.apply_chat_template).parameters
        self._reserved = frozenset(name for name in taken if taken[name].kind is not inspect.Parameter.VAR_KEYWORD)

    def __repr__(self) -> str:
        return f"<TextModel {self.directory.name}, {'with' if self.has_template else 'without'} a chat template>"

    @property
    def has_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(getattr(self._whole, "chat_template", None))

    def encode(self, text: str, *, special: bool = True) -> Int32Array:
        """Token ids int32 [n] of a text; `special`: with what the tokenizer adds around a text."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=special).ids, dtype=np.int32)

    def decode(self, ids: Int32Array, *, skip_special: bool) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special)

    def piece(self, token_id: int) -> str:
        """One token alone as text; bytes that are no character by themselves read as U+FFFD."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return found

    def stream(self, *, skip_special: bool) -> "TextStream":
        """A decoder for tokens as they come."""
        return TextStream(self._tokenizer, skip_special=skip_special)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        generation_prompt: bool,
        continue_last: bool = False,
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat, by the model's own template.

        Args:
            messages: as `chat_messages` gives them.
            generation_prompt: end with the opening of the assistant's turn.
            continue_last: leave the last message open instead.
            tools: descriptions of tools, for templates that show them.
            options: the template's own variables.

        Raises:
            InvalidRequest: no template, a reserved variable, or the template refuses the messages.
        """
        if not self.has_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions or Generate", param="messages")
        for name in options or ():
            if name in self._reserved:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name} is not a variable of the template",
                    param=f"chat_template_kwargs.{name}",
                )
        try:
            return str(
                self._whole.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    continue_final_message=continue_last,
                    **(options or {}),
                )
            )
        except Exception as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from None


class TextStream:
    """The text of tokens as they come; never less than whole characters."""

    def __init__(self, tokenizer: "Tokenizer", *, skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self.broken = False
        """The decoder lost the thread: nothing more is said until the end, when the whole text is known."""

    def feed(self, ids: Int32Array) -> str:
        """What these tokens add."""
        if self.broken:
            return ""
        found = []
        for token_id in ids.tolist():
            try:
                found.append(self._stream.step(self._tokenizer, token_id) or "")
            except Exception as error:
                if "Invalid prefix" not in str(error):
                    raise
                self.broken = True
                break
        return "".join(found)


class Texts:
    """The text model of an app, read once.

    Args:
        named: it was asked for by its name, so `start` reads it; else whoever first asks for it does.
    """

    def __init__(self, directory: Path | None, *, named: bool = False) -> None:
        self.directory = directory
        self._named = named
        self._model: TextModel | None = None
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Texts {self.directory}, {'read' if self._model is not None else 'not read'}>"

    async def start(self) -> None:
        """Read what was named, so that the first text does not wait for it.

        Raises:
            InvalidRequest: it cannot be read.
        """
        if self._named:
            await self.model()

    async def model(self) -> TextModel:
        """The text model.

        Raises:
            InvalidRequest: there is none here.
        """
        if self._model is None:
            directory = self.directory
            if directory is None:
                raise InvalidRequest(
                    "this server has no tokenizer, so it takes and gives no text; start it with --tokenizer DIRECTORY, or "
                    "send token ids to /inference/v1/generate"
                )
            async with self._lock:
                if self._model is None:
                    self._model = await asyncio.to_thread(TextModel, directory)
        return self._model


def chat_messages(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ContentPart]]:
    """Messages as templates read them, and the media in them in order.

    Content that is only text parts becomes one string, parts joined by a newline; where there are media the list stays, for the
    template to place its markers.

    Raises:
        InvalidRequest: a message without a role, or a content part of an unknown kind; by its path.
    """
    found: list[dict[str, Any]] = []
    media: list[ContentPart] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role, content = message.get("role"), message.get("content")
        if message.get("tool_calls"):
            message = {**message, "tool_calls": _calls(message["tool_calls"], where=f"{where}.tool_calls")}
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{where}.role must be a string", param=f"{where}.role")
        if content is None or isinstance(content, str):
            found.append({**message, "content": content or ""})
        elif isinstance(content, list):
            parts = [_part(part, media, where=f"{where}.content[{j}]") for j, part in enumerate(content)]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            found.append({**message, "content": "\n".join(texts) if len(texts) == len(parts) else parts})
        else:
            raise InvalidRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    return found, media


def _calls(calls: Any, *, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn with their arguments as objects, which is how templates write them; OpenAI's bodies hold JSON text."""
    found = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        at = f"{where}[{i}].function"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{at} must be an object with a name", param=at)
        arguments = function.get("arguments") or "{}"
        try:
            read = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{at}.arguments is no JSON: {error}", param=f"{at}.arguments") from None
        if not isinstance(read, dict):
            raise InvalidRequest(f"{at}.arguments must be a JSON object", param=f"{at}.arguments")
        found.append({**call, "function": {**function, "arguments": read}})
    return found


def _part(part: Any, media: list[ContentPart], *, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _MEDIA:
        source = part.get(kind)
        url = source.get("url") if isinstance(source, dict) else source
        if not isinstance(url, str) or not url:
            raise InvalidRequest(f"{where}.{kind}.url must be a string", param=f"{where}.{kind}.url")
        uuid = part.get("uuid")
        if uuid is not None and not isinstance(uuid, str):
            raise InvalidRequest(f"{where}.uuid must be a string", param=f"{where}.uuid")
        media.append(ContentPart(type=kind, url=url, uuid=uuid))
        return {"type": _MEDIA[kind]}
    raise InvalidRequest(f"{where} must be a text, image_url, audio_url or video_url part", param=where)
