"""Worker addresses as people write them, checked and in one form. Pure."""

from typing import Any
from urllib.parse import urlsplit

from rollplane.errors import InvalidRequest


def check_urls(values: Any, *, param: str) -> list[str]:
    """The base URLs of a list, without trailing slashes.

    Raises:
        InvalidRequest: not a list, an entry that is no `http(s)://host[:port]`, or one that stands there twice.
    """
    if not isinstance(values, list):
        raise InvalidRequest(f"{param} must be a list of URLs, got {type(values).__name__}", param=param)
    found: list[str] = []
    for i, value in enumerate(values):
        url = _check_url(value, param=f"{param}[{i}]")
        if url in found:
            raise InvalidRequest(f"{param}[{i}] is {url} a second time", param=f"{param}[{i}]")
        found.append(url)
    return found


def _check_url(value: Any, *, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string, got {type(value).__name__}", param=param)
    try:
        parts = urlsplit(value.strip())
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise InvalidRequest(f"{param} must be http(s)://host[:port], got {value[:200]!r}", param=param)
    return value.strip().rstrip("/")
