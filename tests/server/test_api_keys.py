"""API keys in a store: added, found, limited, revoked and expired, also by several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from carrel.errors import ApiKeyNotFound, ConfigurationError
from carrel.server.auth import ApiKeys, AuthMiddleware, open_keys
from carrel.server.settings import ServerSettings
from carrel.storage.base import Expected, Guard, Stamp
from carrel.storage.memory import MemoryStore


async def test_a_key_is_valid_as_soon_as_it_is_added(tmp_path: Path) -> None:
    async with open_keys(tmp_path) as here, open_keys(tmp_path) as there:
        assert await there.find("carrel_unknown") is None
        for name in ("ann", "bob"):
            found = await there.find(await here.add(name))
            assert found is not None
            assert found.name == name


class SlowStore(MemoryStore):
    """A store in which every write takes its time."""

    async def put(self, key: str, data: bytes, *, expect: Expected = None, guard: Guard | None = None) -> Stamp | None:
        await asyncio.sleep(0.01)
        return await super().put(key, data, expect=expect, guard=guard)


async def test_of_two_keys_with_one_name_that_are_added_at_once_one_is_valid() -> None:
    store = SlowStore()
    one, other = ApiKeys(store), ApiKeys(store)
    added = await asyncio.gather(one.add("ann"), other.add("ann"), return_exceptions=True)
    [key] = [each for each in added if isinstance(each, str)]
    assert [type(each) for each in added if each is not key] == [ConfigurationError]
    assert [found.name for keys in (one, other) if (found := await keys.find(key)) is not None] == ["ann", "ann"]


async def test_a_key_expires(tmp_path: Path) -> None:
    async with open_keys(tmp_path) as keys:
        expired = await keys.add("ann", lifetime=timedelta(seconds=-1))
        assert await keys.find(expired) is None
        assert await keys.list() == []
        valid = await keys.add("ann", lifetime=timedelta(days=7))
        found = await keys.find(valid)
        assert found is not None
        assert found.expires_at is not None
        assert found.expires_at - found.created_at == timedelta(days=7)
        assert await keys.find(expired) is None


async def test_a_user_has_keys_with_several_limits(tmp_path: Path) -> None:
    async with open_keys(tmp_path) as keys:
        full, agent = await keys.add("ann"), await keys.add("ann", scope="agent")
        one = await keys.add("ann", scope="agent", session="a1")
        with pytest.raises(ConfigurationError, match=r"ann \(agent, session a1\) already"):
            await keys.add("ann", scope="agent", session="a1")
        with pytest.raises(ApiKeyNotFound):
            await keys.revoke("ann", scope="read")
        assert len(await keys.revoke("ann", session="a1")) == 1
        assert [await keys.find(key) is not None for key in (full, agent, one)] == [True, True, False]
        await keys.revoke("ann", scope="agent")
        assert [await keys.find(key) is not None for key in (full, agent)] == [True, False]
        await keys.add("ann", scope="agent")
        assert len(await keys.revoke("ann")) == 2


class CountingStore(MemoryStore):
    """A store that counts its reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    async def get(self, key: str) -> bytes | None:
        self.reads.append(key)
        return await super().get(key)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads += keys
        return await super().get_many(keys)

    async def list(self, prefix: str = "") -> list[str]:
        self.reads.append(f"{prefix}/*")
        return await super().list(prefix)


async def test_a_wrong_key_costs_one_read_however_many_keys_there_are() -> None:
    store = CountingStore()
    keys = ApiKeys(store)
    good = await keys.add("ann")
    for number in range(50):
        await keys.add(f"user-{number}")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = AuthMiddleware(app, keys, ServerSettings(wrong_keys_per_second=0.001))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test/api/v1") as client:

        async def status(key: str) -> int:
            return (await client.get("/sessions", headers={"Authorization": f"Bearer {key}"})).status_code

        codes = [await status(f"wrong-{number}") for number in range(60)]
        assert (codes[0], codes[-1]) == (401, 429)
        store.reads.clear()
        assert {await status(f"wrong-{number}") for number in range(500)} == {429}
        assert len(store.reads) == 500
        assert await status("x" * 1000) == 429, "too long to be a key, so it is not looked up"
        assert len(store.reads) == 500
        assert {await status(good) for _ in range(100)} == {200}, "wrong keys do not hold up a valid one"
        assert len(store.reads) <= 502, "a key that was found is not looked up again at once"
