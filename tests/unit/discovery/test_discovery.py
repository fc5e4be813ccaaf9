import asyncio
from pathlib import Path

import pytest

from rollplane.discovery.base import Discovery
from rollplane.discovery.file import FileDiscovery
from rollplane.discovery.static import StaticDiscovery
from rollplane.errors import InvalidRequest, NotFound


async def test_a_static_list_is_said_once_in_one_form() -> None:
    discovery = StaticDiscovery(["http://a:1/", "https://b"])
    assert isinstance(discovery, Discovery)
    watch = discovery.watch()
    assert await anext(watch) == ["http://a:1", "https://b"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watch), 0.01)


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        (["a:1"], r"frontend.workers\[0\] must be http"),
        (["http://"], r"frontend.workers\[0\] must be http"),
        (["http://a:99999999"], r"frontend.workers\[0\] must be http"),
        (["http://a", "http://a/"], r"frontend.workers\[1\] is http://a a second time"),
        ([7], r"frontend.workers\[0\] must be a string, got int"),
    ],
)
def test_an_address_that_is_none_is_refused_by_its_place(urls: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        StaticDiscovery(urls)


@pytest.mark.parametrize(
    ("name", "text"),
    [("workers.json", '{"workers": ["http://a"]}'), ("workers.toml", 'workers = ["http://a"]')],
)
async def test_a_file_is_read_by_its_ending_and_followed(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    watch = FileDiscovery(path, poll_s=0.001).watch()
    assert await anext(watch) == ["http://a"]
    replacement = tmp_path / "new"
    replacement.write_text(text.replace("http://a", "http://b"))
    replacement.replace(path)
    assert await asyncio.wait_for(anext(watch), 5) == ["http://b"]
    await watch.aclose()


@pytest.mark.parametrize("bad", ["{", '{"workers": "http://b"}', '{"workers": ["b"]}', '{"wrokers": []}', "[]", None])
async def test_a_file_that_is_wrong_or_gone_leaves_the_last_good_list(tmp_path: Path, bad: str | None) -> None:
    path = tmp_path / "workers.json"
    path.write_text('{"workers": ["http://a"]}')
    discovery = FileDiscovery(path, poll_s=0.001)
    watch = discovery.watch()
    assert await anext(watch) == ["http://a"]
    if bad is None:
        path.unlink()
    else:
        path.write_text(bad)
    following = asyncio.create_task(anext(watch))
    async with asyncio.timeout(5):
        while discovery.trouble is None:  # noqa: ASYNC110 - the file is looked at by time
            await asyncio.sleep(0.001)
    assert not following.done()
    assert "1 workers" in repr(discovery)
    path.write_text('{"workers": ["http://a", "http://b"]}')
    assert await asyncio.wait_for(following, 5) == ["http://a", "http://b"]
    assert discovery.trouble is None
    await watch.aclose()


def test_reading_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no worker file"):
        FileDiscovery(tmp_path / "absent.json").read()
    path = tmp_path / "workers.json"
    path.write_text('{"workers": [], "extra": 1}')
    with pytest.raises(InvalidRequest, match="one table with `workers`"):
        FileDiscovery(path).read()
