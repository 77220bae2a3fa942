"""LangGraph's checkpoints in a carrel storage: a folder, Redis, Postgres or memory."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import orjson
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from carrel.adapters.sessions import key_part
from carrel.session.background_loop import BackgroundLoop
from carrel.session.storage import StorageBackend

ROOT = "langgraph"
CHECKPOINT, WRITES = "checkpoint", "writes"

Record = dict[str, Any]


class AsyncCarrelSaver(BaseCheckpointSaver[int]):
    """A checkpoint saver for graphs that are awaited: `builder.compile(checkpointer=AsyncCarrelSaver(storage))`.

    A checkpoint is an object `langgraph/THREAD/NAMESPACE/ID/checkpoint`, replaced atomically; the writes of its tasks
    are a log beside it. Several processes may use one storage."""

    def __init__(self, storage: StorageBackend, *, serde: SerializerProtocol | None = None) -> None:
        super().__init__(serde=serde)
        self._store = storage.store

    # --- reading ----------------------------------------------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        folder = _folder(config)
        wanted = get_checkpoint_id(config)
        for checkpoint_id in [wanted] if wanted else await self._ids(folder):
            found = await self._tuple(folder, checkpoint_id)
            if found is not None:
                return found
        return None

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        async for found in self._list(config, filter, before, limit):
            yield found

    async def _list(
        self,
        config: RunnableConfig | None,
        wanted: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> AsyncGenerator[CheckpointTuple]:
        """Yield the checkpoints that match, newest first."""
        given = config["configurable"] if config else {}
        only, end = get_checkpoint_id(config) if config else None, get_checkpoint_id(before) if before else None
        found = [
            (checkpoint_id, folder)
            for folder in await self._folders(given.get("thread_id"), given.get("checkpoint_ns"))
            for checkpoint_id in await self._ids(folder)
            if (not only or checkpoint_id == only) and (not end or checkpoint_id < end)
        ]
        for checkpoint_id, folder in sorted(found, reverse=True):
            if limit is not None and limit <= 0:
                return
            one = await self._tuple(folder, checkpoint_id)
            if one is not None and all(one.metadata.get(key) == value for key, value in (wanted or {}).items()):
                limit = None if limit is None else limit - 1
                yield one

    async def _folders(self, thread_id: object = None, namespace: str | None = None) -> list[str]:
        """Return the folders of all namespaces of all threads, or of the given ones."""
        threads = await self._store.folders(ROOT) if thread_id is None else [key_part(thread_id)]
        return [
            f"{ROOT}/{thread}/{name}"
            for thread in threads
            for name in await self._store.folders(f"{ROOT}/{thread}")
            if namespace is None or name == key_part(namespace)
        ]

    async def _ids(self, folder: str) -> list[str]:
        """Return the ids below a namespace, newest first; for some of them there may be writes only."""
        return sorted((unquote(name[1:]) for name in await self._store.folders(folder)), reverse=True)

    async def _record(self, folder: str, checkpoint_id: str) -> Record | None:
        data = await self._store.get(f"{folder}/{key_part(checkpoint_id)}/{CHECKPOINT}")
        record: Record | None = None if data is None else orjson.loads(data)
        return record

    async def _tuple(self, folder: str, checkpoint_id: str) -> CheckpointTuple | None:
        record = await self._record(folder, checkpoint_id)
        if record is None:
            return None
        parent = record["parent_id"]
        return CheckpointTuple(
            config=_config(record, checkpoint_id),
            checkpoint=self._load(record["checkpoint"]),
            metadata=self._load(record["metadata"]),
            parent_config=_config(record, parent) if parent else None,
            pending_writes=[
                (write["task_id"], write["channel"], self._load(write["value"]))
                for write in await self._writes(folder, checkpoint_id)
            ],
        )

    async def _writes(self, folder: str, checkpoint_id: str) -> list[Record]:
        """Return the writes in the order in which they are replayed.

        Of several with one number the first counts; for the negative numbers of special channels, the last."""
        found: dict[tuple[str, int], Record] = {}
        async for block in self._store.read(f"{folder}/{key_part(checkpoint_id)}/{WRITES}"):
            for write in orjson.loads(block.array):
                key = write["task_id"], write["index"]
                if write["index"] < 0 or key not in found:
                    found[key] = write
        return [found[key] for key in sorted(found, key=lambda key: writes_sort_key(found[key]["task_path"], *key))]

    # --- writing ----------------------------------------------------------------------------------------------------

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        merged = get_checkpoint_metadata(config, metadata)
        given = config["configurable"]
        record = {
            "thread_id": str(given["thread_id"]),
            "checkpoint_ns": given.get("checkpoint_ns", ""),
            "parent_id": given.get("checkpoint_id"),
            "run_id": merged.get("run_id"),
            "metadata": self._dump(merged),
            "checkpoint": self._dump(checkpoint),
        }
        await self._store.put(f"{_folder(config)}/{key_part(checkpoint['id'])}/{CHECKPOINT}", orjson.dumps(record))
        return _config(record, checkpoint["id"])

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        records = [
            orjson.dumps(
                {
                    "task_id": task_id,
                    "task_path": task_path,
                    "index": WRITES_IDX_MAP.get(channel, index),
                    "channel": channel,
                    "value": self._dump(value),
                }
            )
            for index, (channel, value) in enumerate(writes)
        ]
        key = f"{_folder(config)}/{key_part(config['configurable']['checkpoint_id'])}/{WRITES}"
        if records:
            await self._store.append(key, records)

    def _dump(self, value: Any) -> list[str]:
        kind, data = self.serde.dumps_typed(value)
        return [kind, b64encode(data).decode("ascii")]

    def _load(self, dumped: list[str]) -> Any:
        return self.serde.loads_typed((dumped[0], b64decode(dumped[1])))

    # --- whole threads ----------------------------------------------------------------------------------------------

    async def adelete_thread(self, thread_id: str) -> None:
        await self._store.delete(f"{ROOT}/{key_part(thread_id)}")

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of these runs; reads every checkpoint of the storage."""
        for folder in await self._folders() if run_ids else []:
            for checkpoint_id in await self._ids(folder):
                record = await self._record(folder, checkpoint_id)
                if record is not None and record["run_id"] in run_ids:
                    await self._store.delete(f"{folder}/{key_part(checkpoint_id)}")

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints with their writes; a checkpoint appears in the target after its writes."""
        for folder in await self._folders(source_thread_id):
            target = f"{ROOT}/{key_part(target_thread_id)}/{folder.rpartition('/')[2]}"
            for checkpoint_id in reversed(await self._ids(folder)):
                path = key_part(checkpoint_id)
                async for block in self._store.read(f"{folder}/{path}/{WRITES}"):
                    await self._store.append(f"{target}/{path}/{WRITES}", block.records)
                record = await self._record(folder, checkpoint_id)
                if record is not None:
                    copy = orjson.dumps(record | {"thread_id": str(target_thread_id)})
                    await self._store.put(f"{target}/{path}/{CHECKPOINT}", copy)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete threads (`delete`), or all but the newest checkpoint of each namespace (`keep_latest`).

        Ancestors that a kept checkpoint's delta channels are rebuilt from are kept too."""
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(f"strategy is {strategy!r}; it can be 'keep_latest' or 'delete'")
        for thread_id in thread_ids:
            if strategy == "delete":
                await self.adelete_thread(thread_id)
                continue
            for folder in await self._folders(thread_id):
                kept = await self._needed(folder)
                for checkpoint_id in await self._ids(folder) if kept else []:
                    if checkpoint_id not in kept:
                        await self._store.delete(f"{folder}/{key_part(checkpoint_id)}")

    async def _needed(self, folder: str) -> set[str]:
        """Return the newest checkpoint and those from which its delta channels are rebuilt."""
        needed: set[str] = set()
        missing: set[str] | None = None
        for checkpoint_id in await self._ids(folder):
            found = await self._tuple(folder, checkpoint_id)
            break
        else:
            return needed
        while found is not None:
            needed.add(found.config["configurable"]["checkpoint_id"])
            if missing is None:
                missing = set(found.metadata.get("counters_since_delta_snapshot") or ())
            missing -= found.checkpoint["channel_values"].keys()
            if not missing or found.parent_config is None:
                break
            found = await self._tuple(folder, found.parent_config["configurable"]["checkpoint_id"])
        return needed


class CarrelSaver(AsyncCarrelSaver):
    """A checkpoint saver for graphs that are called, with or without asyncio: `CarrelSaver(storage)`."""

    def __init__(self, storage: StorageBackend, *, serde: SerializerProtocol | None = None) -> None:
        super().__init__(storage, serde=serde)
        self._loop = BackgroundLoop.shared()

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self._loop.wait(self.aget_tuple(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        yield from self._loop.iterate(self._list(config, filter, before, limit))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return self._loop.wait(self.aput(config, checkpoint, metadata, new_versions))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        self._loop.wait(self.aput_writes(config, writes, task_id, task_path))

    def delete_thread(self, thread_id: str) -> None:
        self._loop.wait(self.adelete_thread(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        self._loop.wait(self.adelete_for_runs(run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self._loop.wait(self.acopy_thread(source_thread_id, target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self._loop.wait(self.aprune(thread_ids, strategy=strategy))


def _config(record: Record, checkpoint_id: str) -> RunnableConfig:
    names = {"thread_id": record["thread_id"], "checkpoint_ns": record["checkpoint_ns"]}
    return {"configurable": {**names, "checkpoint_id": checkpoint_id}}


def _folder(config: RunnableConfig) -> str:
    given = config["configurable"]
    return f"{ROOT}/{key_part(given['thread_id'])}/{key_part(given.get('checkpoint_ns', ''))}"
