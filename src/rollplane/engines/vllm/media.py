"""Raw media: which URLs may be fetched, and vLLM's own renderer for what they hold.

A part's `uuid` is the caller's label and no identity: vLLM would take it for one and answer with whatever it cached
under it, so it stays here and vLLM hashes the content.
"""

import asyncio
from typing import Any
from urllib.parse import urlsplit

from rollplane.engines.vllm import versions
from rollplane.errors import InvalidRequest
from rollplane.protocol.rendered import RenderBody, Rendered
from rollplane.protocol.request import ContentPart


def check_urls(parts: list[ContentPart], *, allowed_hosts: list[str] | None) -> None:
    """Let in data URLs, and http(s) ones of the hosts that the engine was started with (`--allowed-media-domains`).

    Raises:
        InvalidRequest: any other; naming the part.
    """
    for i, part in enumerate(parts):
        where = f"content_parts[{i}].url"
        try:
            url = urlsplit(part.url)
            host = url.hostname
        except ValueError:
            raise InvalidRequest(f"{where} is not a URL", param=where) from None
        if url.scheme == "data":
            continue
        if url.scheme not in ("http", "https"):
            raise InvalidRequest(
                f"{where} has the scheme {url.scheme[:32]!r}; data, http and https are read", param=where
            )
        if not allowed_hosts or host not in allowed_hosts or url.username is not None:
            raise InvalidRequest(
                f"{where}: the host {str(host)[:128]!r} is not one this server fetches from (--allowed-media-domains)",
                param=where,
            )


async def rendered(engine: Any, token_ids: list[int], parts: list[ContentPart], *, for_engine: bool = True) -> Any:
    """The engine input of a prompt with raw media, expanded by vLLM's own renderer; `for_engine`: it is submitted.

    Raises:
        InvalidRequest: media that cannot be fetched or decoded, or that the prompt has no place for.
    """
    try:
        return await versions.render_media(
            engine,
            {"prompt_token_ids": token_ids},
            [(part.type, part.url) for part in parts],
            for_engine=for_engine,
        )
    except Exception as error:  # fetching and decoding of foreign bytes: whatever it raises, the media are refused
        raise InvalidRequest(
            f"content_parts cannot be processed: {type(error).__name__}: {str(error)[:300]}", param="content_parts"
        ) from error


async def render(engine: Any, body: RenderBody, *, allowed_hosts: list[str] | None) -> Rendered:
    """The features of raw media; see `engines.base.MediaRenderer`."""
    check_urls(body.content_parts, allowed_hosts=allowed_hosts)
    made = await rendered(engine, body.token_ids, body.content_parts, for_engine=False)
    features = await asyncio.to_thread(versions.features_tree, made)
    if features is None:
        raise InvalidRequest("the prompt has no place for the media", param="content_parts")
    return Rendered(token_ids=list(made["prompt_token_ids"]), features=features)


def placeholders_of(prompt: Any) -> dict[str, list[dict[str, Any]]] | None:
    """Where the media of an engine input are in its prompt; None for text."""
    if prompt.get("type") != "multimodal":
        return None
    found: dict[str, list[dict[str, Any]]] = {}
    for modality, ranges in prompt["mm_placeholders"].items():
        for place in ranges:
            entry: dict[str, Any] = {"offset": int(place.offset), "length": int(place.length)}
            if place.is_embed is not None:
                entry["is_embed"] = place.is_embed.tolist()
            found.setdefault(modality, []).append(entry)
    return found
