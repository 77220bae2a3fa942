"""Listing ten thousand sessions, the first time and again."""

import json
from pathlib import Path
from typing import Any

from carrel.conversation.messages import user_text_message
from carrel.conversation.store import SessionStore
from measure import Line, Scale, in_turn, times_faster


def plain_list(folder: Path) -> list[dict[str, Any]]:
    metas = []
    for home in folder.iterdir():
        path = home / "meta.json"
        if path.exists():
            with path.open() as file:
                metas.append(json.load(file))
    return sorted(metas, key=lambda meta: str(meta["updated_at"]), reverse=True)


async def measure(scale: Scale) -> list[Line]:
    count = scale(10_000)
    folder = scale.folder / "list"
    async with SessionStore(folder, embedder=False) as store:
        for number in range(count):
            await store.append_message(f"session-{number:06d}", user_text_message(f"a question, number {number}"))

    async def plain() -> None:
        assert len(plain_list(folder)) == count

    async def cold() -> None:
        async with SessionStore(folder, embedder=False) as store:
            assert len(await store.list_sessions()) == count

    first = await in_turn(5, ours=cold, plain=plain)
    async with SessionStore(folder, embedder=False) as store:
        await store.list_sessions()

        async def warm() -> None:
            assert len(await store.list_sessions()) == count

        again = await in_turn(7, ours=warm, plain=plain)

        async def after_an_append() -> None:
            await store.append_message("session-000000", user_text_message("more"))
            assert (await store.list_sessions())[0]["id"] == "session-000000"

        changed = await in_turn(5, ours=after_an_append, plain=plain)
    how = f"{count} sessions; plain: open and json.load of every meta.json, sort"
    return [
        times_faster("list, cold", first, 1, unit="ms", how=f"{how}; a new store each time"),
        times_faster("list, warm", again, 4, unit="ms", how=how),
        times_faster("list, warm, after one append", changed, 1, unit="ms", how=how),
    ]
