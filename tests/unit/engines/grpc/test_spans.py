from rollplane.engines.grpc.spans import SpanTracker
from rollplane.protocol.versions import check_spans


def spans(tracker: SpanTracker, *, tokens: int):
    tracker.tokens = tokens
    found = tracker.spans()
    check_spans(found, tokens=tokens)
    return found


def test_one_version_makes_one_span():
    assert spans(SpanTracker("v7", exact=False), tokens=9) == [("v7", 0)]


def test_a_counted_call_knows_the_boundary():
    tracker = SpanTracker("v7", exact=True)
    tracker.tokens = 5
    tracker.resumed("v8")
    tracker.tokens = 8
    tracker.resumed("v9")

    assert spans(tracker, tokens=20) == [("v7", 0), ("v8", 5), ("v9", 8)]


def test_a_unary_call_does_not_guess():
    tracker = SpanTracker("v7", exact=False)
    tracker.resumed("v8")

    assert spans(tracker, tokens=20) == [("v7", 0), ("v8", None)]


def test_what_was_sent_while_paused_began_under_the_new_version():
    tracker = SpanTracker("v7", exact=False, born_paused=True)
    tracker.resumed("v8")
    assert spans(tracker, tokens=3) == [("v8", 0)]

    tracker.resumed("v9")
    assert spans(tracker, tokens=3) == [("v8", 0), ("v9", None)]


def test_a_version_that_made_no_token_is_left_out():
    tracker = SpanTracker("v7", exact=True)
    tracker.resumed("v8")
    assert tracker.spans() == [("v8", 0)]

    tracker.tokens = 4
    tracker.resumed("v9")
    assert spans(tracker, tokens=4) == [("v8", 0)]


def test_a_resume_without_a_change_is_none():
    tracker = SpanTracker("v7", exact=True)
    tracker.tokens = 4
    tracker.resumed("v7")

    assert spans(tracker, tokens=9) == [("v7", 0)]


def test_a_label_that_changes_under_way_has_no_known_boundary():
    tracker = SpanTracker("v7", exact=True)
    tracker.tokens = 4
    tracker.relabelled("v8")

    assert spans(tracker, tokens=9) == [("v7", 0), ("v8", None)]


def test_a_choice_without_tokens_has_the_version_it_met():
    tracker = SpanTracker("v7", exact=True)

    assert spans(tracker, tokens=0) == [("v7", 0)]
