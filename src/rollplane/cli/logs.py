"""Log lines: an event name and keys, on standard error (standard output is for the ready line)."""

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any

import structlog

from rollplane.config import ServerSettings


def configure_logs(settings: ServerSettings) -> None:
    """Set up structlog, and the standard library's loggers of the libraries beneath, for this process.

    Tracebacks carry no local variables: those of a request hold its bearer key and its tokens.
    """
    level = getattr(logging, settings.log_level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    as_json = settings.log_format == "json"
    last: list[Any] = (
        [
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
        if as_json
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        stream=sys.stderr, level=max(level, logging.WARNING), format="%(levelname)s %(name)s %(message)s"
    )


def run_logged(settings: ServerSettings, work: Coroutine[Any, Any, None]) -> None:
    """Run a server's coroutine in a new event loop (uvloop where it is installed) with logs set up."""
    configure_logs(settings)
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(work)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)
