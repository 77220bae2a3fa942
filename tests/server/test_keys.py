"""Keys that one process hands out and another looks at."""

from pathlib import Path

from carrel.server.keys import opened_keys


async def test_a_key_is_good_as_soon_as_it_is_added(tmp_path: Path) -> None:
    async with opened_keys(tmp_path) as here, opened_keys(tmp_path) as there:
        assert await there.user_of("carrel_nobodys") is None
        for name in ("ann", "bob"):
            key = await here.add(name)
            assert await there.user_of(key) == name, "the list there was looked at a moment ago"
