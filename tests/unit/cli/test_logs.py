"""What a line of the log says, and what it must not say."""

import sys
from collections.abc import Iterator

import pytest
import structlog

from rollplane.cli.logs import configure_logs
from rollplane.config import ServerSettings


@pytest.fixture(autouse=True)
def _defaults_afterwards() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_an_unexpected_error_is_logged_with_its_traceback_and_without_its_callers_key(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(headers: dict[str, str]) -> None:
        raise ValueError(f"broke on {len(headers)} headers")

    configure_logs(ServerSettings(log_format=log_format))  # type: ignore[arg-type]
    secret = "-".join(("do", "not", "tell"))  # a traceback shows lines of source, which must not hold it
    try:
        serve({"authorization": f"Bearer {secret}"})
    except ValueError:
        structlog.get_logger("test").error("unexpected_error", exc_info=sys.exc_info())
    written = capsys.readouterr().err
    assert "unexpected_error" in written
    assert "broke on 1 headers" in written
    assert "in serve" in written or '"serve"' in written  # the frame that raised
    assert secret not in written
