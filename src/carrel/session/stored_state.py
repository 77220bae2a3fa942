"""The files and variables of a durable session in a store that several machines share.

    sessions/ID/workspace-state/blobs/DIGEST    compressed archives of files, and the variables

They are named by their content, so what has not changed is not sent again. `StateRecord.stored` lists those in use."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from carrel.errors import KeyMissing, StateNotSaved
from carrel.execution import temp_dirs
from carrel.execution.packed_state import StateImport, pack_files, state_manifest
from carrel.storage.base import Store

_PIECE = 1 << 20


class StoredState:
    """Sends the state in a folder to a store, and fetches it from there."""

    def __init__(self, store: Store, prefix: str, folder: Path, most: int | None) -> None:
        """`most` is how many bytes the files may have."""
        self._store, self._prefix, self._folder, self._most = store, prefix, folder, most

    def place(self) -> str:
        """A name for this folder, which no other machine's folder has."""
        path = self._folder / "place"
        with suppress(FileNotFoundError):
            return path.read_text(encoding="ascii")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex, encoding="ascii")
        return path.read_text(encoding="ascii")

    def _key(self, digest: str) -> str:
        return f"{self._prefix}/blobs/{digest}"

    async def send(self) -> dict[str, Any]:
        """Store the state as it is now, and return what lists it; `remove_unused` comes after that was written."""
        manifest = await asyncio.to_thread(state_manifest, self._folder)
        if manifest is None:
            raise StateNotSaved("the files were not stored: there is no state of the session in its folder")
        known = {key.rpartition("/")[2] for key in await self._store.list(f"{self._prefix}/blobs")}
        archives = pack_files(self._folder, str(manifest["generation"]), self._most)
        files: list[str] = []
        try:
            while (packed := await asyncio.to_thread(next, archives, None)) is not None:
                await self._send_new(*packed, known)
                files.append(packed[0])
        finally:
            await asyncio.to_thread(archives.close)
        variables = ""
        if (self._folder / "variables").exists():
            spool = temp_dirs.new_folder("variables")
            try:
                variables = await asyncio.to_thread(_compress, self._folder / "variables", spool / "variables")
                await self._send_new(variables, spool / "variables", known)
            finally:
                await asyncio.to_thread(temp_dirs.remove, spool)
        return {"files": files, "variables": variables, "manifest": manifest}

    async def _send_new(self, digest: str, path: Path, known: set[str]) -> None:
        if digest not in known:
            await self._store.put_pieces(self._key(digest), _pieces(path))
            known.add(digest)

    async def remove_unused(self, stored: dict[str, Any]) -> None:
        """Remove what is not in this list."""
        used = {*stored["files"], stored["variables"]}
        for key in await self._store.list(f"{self._prefix}/blobs"):
            if key.rpartition("/")[2] not in used:
                await self._store.delete(key)

    async def fetch(self, stored: dict[str, Any]) -> str:
        """Replace the state in the folder by the stored one; with an empty list, by none.

        Returns what could not be fetched."""
        spool = temp_dirs.new_folder("state")
        problem = ""
        importing = await asyncio.to_thread(StateImport, self._folder, stored.get("manifest") or {}, self._most)
        try:
            variables: Path | None = None
            try:
                for digest in stored.get("files") or []:
                    await self._receive(str(digest), spool / "archive")
                    await asyncio.to_thread(importing.add, spool / "archive")
                if stored.get("variables"):
                    await self._receive(str(stored["variables"]), spool / "compressed")
                    variables = spool / "variables"
                    await asyncio.to_thread(_decompress, spool / "compressed", variables)
            except (StateNotSaved, KeyMissing, EOFError, OSError) as damaged:
                problem, variables = f"what was stored of the session is damaged: {damaged}", None
            await asyncio.to_thread(importing.finish, variables)
        finally:
            importing.close()
            await asyncio.to_thread(temp_dirs.remove, spool)
        return problem

    async def _receive(self, digest: str, path: Path) -> None:
        with path.open("wb") as file:
            async for piece in self._store.pieces(self._key(digest)):
                await asyncio.to_thread(file.write, piece)


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _compress(source: Path, target: Path) -> str:
    """Compress a file, and return the digest of its content."""
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as out, gzip.GzipFile("", "wb", 1, out, mtime=0) as compressed:
        while piece := read.read(_PIECE):
            digest.update(piece)
            compressed.write(piece)
    return digest.hexdigest()


def _decompress(source: Path, target: Path) -> None:
    with gzip.open(source) as compressed, target.open("wb") as out:
        shutil.copyfileobj(compressed, out, _PIECE)
