"""A book of keys: the first keeper stays, within bounds of number and time."""

from rollplane.engines.wrappers.key_book import KeyBook
from rollplane.testing.clock import FakeClock


def test_the_first_claim_of_a_key_stands() -> None:
    book = KeyBook()
    assert book.claim("k", "a") == ("a", 1)
    assert book.claim("k", "b") == ("a", 1)
    assert book.claim("other", "b") == ("b", 1)


def test_a_later_keeper_takes_the_place_of_an_earlier_one_and_never_the_reverse() -> None:
    book = KeyBook()
    book.claim("k", "a")
    assert book.claim("k", "b", number=2) == ("b", 2)
    assert book.claim("k", "c", number=2) == ("b", 2)
    assert book.claim("k", "a", number=1) == ("b", 2)


def test_the_keys_longest_not_asked_about_go_first() -> None:
    book = KeyBook(max_keys=2)
    for key in ("k", "l"):
        book.claim(key, "a")
    book.claim("k", "b")
    book.claim("m", "a")
    assert book.claim("k", "b") == ("a", 1)
    assert book.claim("l", "b") == ("b", 1)


async def test_a_key_is_forgotten_after_its_time() -> None:
    clock = FakeClock()
    book = KeyBook(max_age_s=10.0, clock=clock)
    book.claim("k", "a")
    await clock.advance(11.0)
    assert book.claim("k", "b") == ("b", 1)
    assert repr(book) == "<KeyBook 1 keys>"
