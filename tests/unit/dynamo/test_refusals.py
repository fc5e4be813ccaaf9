import pytest

from rollplane import errors
from rollplane.dynamo.refusals import refusal_of


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidRequest("x"), "invalid"),
        (errors.ContextOverflow("x"), "invalid"),
        (errors.NotFound("x"), "invalid"),
        (errors.PreconditionFailed("x"), "invalid"),
        (errors.PayloadTooLarge("x"), "invalid"),
        (errors.DeadlineExceeded("x"), "invalid"),
        (errors.Overloaded("x"), "busy"),
        (errors.Unavailable("x"), "busy"),
        (errors.Cancelled("x"), "cancelled"),
        (errors.EngineDied("x"), "gone"),
        (errors.EngineFailed("x"), "failed"),
        (errors.EngineProtocolError("x"), "failed"),
        (errors.RollplaneError("x"), "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_each_error_has_its_word(error: errors.RollplaneError, kind: str) -> None:
    assert refusal_of(error) == kind


def test_only_a_dead_engine_takes_a_worker_out() -> None:
    gone = [cls for cls in errors.error_classes().values() if refusal_of(cls("x")) == "gone"]

    assert gone == [errors.EngineDied]
