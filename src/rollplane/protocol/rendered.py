"""A prompt with its media processed: what a renderer makes, and how a frontend asks a worker for it."""

from typing import Any, Final

import msgspec

from rollplane.protocol.request import ContentPart

RENDER_PATH: Final = "/internal/v1/render"


class RenderBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`token_ids` with one placeholder per medium, and the media in the prompt's order."""

    token_ids: list[int]
    content_parts: list[ContentPart]


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """`token_ids` with every placeholder expanded; `features` as the field of that name on Generate takes them."""

    token_ids: list[int]
    features: dict[str, Any]
