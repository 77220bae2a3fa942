"""Which node has a session: written before the node is requested to create it, and kept with its records.

It changes when the node has not created the session, or when a session is resumed whose node is lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from carrel.server.records import SESSION_ID, session_folder
from carrel.storage.base import MISSING, Store
from carrel.wire.answers import SessionRecord

_CACHED = 100_000


class Directory:
    """The node of each session, in `server/sessions/<id>/node`; for others, the node that their record names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[str, str] = OrderedDict()

    def known(self, session_id: str, nodes: Container[str]) -> str | None:
        """Return the node of a session if it is known here and one of `nodes`."""
        found = self._cache.get(session_id)
        return found if found is not None and found in nodes else None

    async def find(self, session_id: str, nodes: Container[str] | None = None) -> str | None:
        """Return the node of a session; None if there is no such session, or none has it.

        What is known of a session is read again if its node is not one of `nodes`: it may have moved."""
        if (known := self._cache.get(session_id)) is not None and (nodes is None or known in nodes):
            return known
        if SESSION_ID.fullmatch(session_id) is None:
            return None
        folder = session_folder(session_id)
        entry, record = await self._store.get_many([f"{folder}/node", f"{folder}/record.json"])
        node = entry.decode("utf-8", "replace") if entry else _node_in(record)
        if node is not None:
            self._remember(session_id, node)
        return node

    async def assign(self, session_id: str, node: str) -> str:
        """Give a new session to a node; returns the one that it was given to before, if it was."""
        if await self._store.put(_key(session_id), node.encode(), expect=MISSING) is None:
            self.forget(session_id)
            return await self.find(session_id) or node
        self._remember(session_id, node)
        return node

    async def move(self, session_id: str, before: str, node: str) -> str:
        """Give a session that `before` has not, or has lost, to another node; returns the node that has it then."""
        key = _key(session_id)
        stamp = await self._store.stamp(key)
        found = await self._store.get(key)
        if stamp is None or found is None or found.decode("utf-8", "replace") != before:
            self.forget(session_id)
            return await self.find(session_id) or await self.assign(session_id, node)
        if await self._store.put(key, node.encode(), expect=stamp) is None:
            self.forget(session_id)
            return await self.find(session_id) or node
        self._remember(session_id, node)
        return node

    async def correct(self, session_id: str) -> str | None:
        """Return the node that the record of a session names, and keep it, because the directory was wrong."""
        key = _key(session_id)
        stamp = await self._store.stamp(key)
        node = _node_in(await self._store.get(f"{session_folder(session_id)}/record.json"))
        if node is not None:
            await self._store.put(key, node.encode(), expect=stamp or MISSING)
        self.forget(session_id)
        return node

    def forget(self, session_id: str) -> None:
        """Read the store at the next `find`."""
        self._cache.pop(session_id, None)

    def _remember(self, session_id: str, node: str) -> None:
        self._cache[session_id] = node
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)


def _key(session_id: str) -> str:
    return f"{session_folder(session_id)}/node"


def _node_in(record: bytes | None) -> str | None:
    try:
        return SessionRecord.model_validate_json(record).node if record else None
    except ValueError:
        return None
