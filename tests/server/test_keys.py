"""Keys that one process hands out and another looks at."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carrel.errors import ConfigurationError
from carrel.server.keys import Keys, opened_keys
from carrel.storage.memory import MemoryStore


async def test_a_key_is_good_as_soon_as_it_is_added(tmp_path: Path) -> None:
    async with opened_keys(tmp_path) as here, opened_keys(tmp_path) as there:
        assert await there.find("carrel_unknown") is None
        for name in ("ann", "bob"):
            key = await here.add(name)
            found = await there.find(key, look_again=True)
            assert found is not None, "the list there was looked at a moment ago"
            assert found.name == name


class Far(MemoryStore):
    """A store to which what is appended takes its time."""

    async def append(self, key: str, records: Sequence[bytes], **how: Any) -> int:
        await asyncio.sleep(0.01)
        return await super().append(key, records, **how)


async def test_of_two_who_add_a_key_of_one_name_at_once_one_is_told_it() -> None:
    store = Far()
    one, other = Keys(store), Keys(store)
    told = await asyncio.gather(one.add("ann"), other.add("ann"), return_exceptions=True)
    [key] = [each for each in told if isinstance(each, str)]
    assert [type(each) for each in told if each is not key] == [ConfigurationError]
    for keys in (one, other):
        found = await keys.find(key)
        assert found is not None
        assert found.name == "ann"
