"""Any sequence of append, rewind, compact, fork, label, crash and reload equals a simple model, on every backend."""

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from carrel.conversation.store import SessionStore
from carrel.errors import CompactRefused, RewindRefused
from carrel.storage.base import Store
from carrel.storage.files.store import FileStore
from carrel.storage.memory import MemoryStore
from carrel.storage.redis.store import RedisStore
from tests.support.messages import outline, user

T = TypeVar("T")
Visible = tuple[str, ...]
SYNTHETIC = ("(sum)", "(ack)")


class Sessions(RuleBasedStateMachine):
    """The model: for each session, what was visible after each of its entries."""

    backend = "memory"
    redis_url = ""
    ids = Bundle("ids")

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="carrel-model-"))
        self.prefix = uuid.uuid4().hex
        self.memory = MemoryStore()
        self.abandoned: list[SessionStore] = []
        self.history: dict[str, list[Visible]] = {}
        self.labels: dict[str, list[tuple[str, int]]] = {}
        self.count = 0
        self.open()

    def open(self) -> None:
        backends: dict[str, Any] = {
            "memory": lambda: self.memory,
            "file": lambda: FileStore(self.folder),
            "redis": lambda: RedisStore(self.redis_url, self.prefix),
        }
        backend: Store = backends[self.backend]()
        self.store = SessionStore(store=backend, embedder=False)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def word(self) -> str:
        self.count += 1
        return f"w{self.count}"

    @rule(target=ids)
    def create(self) -> str:
        id_ = self.run(self.store.create_session("t"))["session"]["id"]
        self.history[id_], self.labels[id_] = [()], []
        return id_

    @rule(id_=ids, number=st.integers(1, 3))
    def append(self, id_: str, number: int) -> None:
        if id_ not in self.history:
            return
        words = [self.word() for _ in range(number)]
        seq = self.run(self.store.append_many(id_, [user(word) for word in words]))
        for word in words:
            self.history[id_].append((*self.history[id_][-1], word))
        assert seq == len(self.history[id_]) - 1

    @rule(id_=ids, place=st.integers(-1, 8))
    def rewind(self, id_: str, place: int) -> None:
        if id_ not in self.history:
            return
        visible = self.history[id_][-1]
        if 0 <= place <= len(visible):
            self.run(self.store.append_rewind(id_, place))
            self.history[id_].append(visible[:place])
        else:
            with pytest.raises(RewindRefused):
                self.run(self.store.append_rewind(id_, place))

    @rule(id_=ids, part=st.floats(0, 1))
    def rewind_to_entry(self, id_: str, part: float) -> None:
        if id_ not in self.history:
            return
        seq = round(part * (len(self.history[id_]) - 1))
        self.run(self.store.append_rewind(id_, to_seq=seq))
        self.history[id_].append(self.history[id_][seq])

    @rule(id_=ids, keep=st.integers(0, 3))
    def compact(self, id_: str, keep: int) -> None:
        if id_ not in self.history:
            return

        async def summarize(messages: list[Any]) -> str:
            return "sum"

        words = [word for word in self.history[id_][-1] if word not in SYNTHETIC]
        work = self.store.compact(id_, summarize, keep_turns=keep)
        if keep >= len(words):
            with pytest.raises(CompactRefused):
                self.run(work)
            return
        self.run(work)
        self.history[id_].append((*SYNTHETIC, *words[len(words) - keep :]))

    @rule(id_=ids)
    def clear(self, id_: str) -> None:
        if id_ not in self.history:
            return
        self.run(self.store.clear_session(id_))
        if self.history[id_][-1]:
            self.history[id_].append(())

    @rule(id_=ids, part=st.floats(0, 1))
    def label(self, id_: str, part: float) -> None:
        last = len(self.history.get(id_, [()])) - 1
        if last < 1:
            return
        seq = max(1, round(part * last))
        word = self.word()
        self.run(self.store.label(id_, word, at=seq))
        self.labels[id_].append((word, seq))
        self.history[id_].append(self.history[id_][-1])

    @rule(target=ids, id_=ids, part=st.floats(0, 1))
    def fork(self, id_: str, part: float) -> str:
        if id_ not in self.history:
            return id_
        seq = round(part * (len(self.history[id_]) - 1))
        fork = self.run(self.store.fork_session(id_, at=seq))["session"]["id"]
        past = self.history[id_][: seq + 1]
        self.history[fork] = [*past, past[-1], past[-1]]
        self.labels[fork] = self.run(self._labels(fork))
        assert set(self.labels[fork]) <= set(self.labels[id_])
        return fork

    async def _labels(self, id_: str) -> list[tuple[str, int]]:
        return [(label["text"], label["at_seq"]) for label in await self.store.labels(id_)]

    @rule(id_=consumes(ids))
    def delete(self, id_: str) -> None:
        there = self.run(self.store.delete_session(id_))
        assert there == (self.history.pop(id_, None) is not None)

    @rule()
    def restart(self) -> None:
        self.run(self.store.close())
        self.open()

    @rule(torn=st.sampled_from([b"", b"{", b'{"role":"user","content":[{"type":"te', b"\xff\x00"]))
    def crash(self, torn: bytes) -> None:
        """The process goes without a word; on disk it may leave half a line."""
        self.abandoned.append(self.store)
        if self.backend == "file":
            for id_ in self.history:
                with open(self.folder / id_ / "messages.jsonl", "ab") as log:
                    log.write(torn)
        self.open()

    @rule(id_=ids, junk=st.sampled_from([b"", b"[]", b"{"]))
    def lose_metadata(self, id_: str, junk: bytes) -> None:
        if id_ in self.history:
            self.run(self.store.close())
            self.run(self.store._logs.store.put(f"{id_}/meta.json", junk))
            self.open()

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        if not hasattr(self, "store"):
            return
        for id_, history in self.history.items():
            data = self.run(self.store.load_session(id_))
            assert data is not None
            assert tuple(outline(data["messages"])) == history[-1]
            assert self.run(self._labels(id_)) == self.labels[id_]
        assert {meta["id"] for meta in self.run(self.store.list_sessions())} == set(self.history)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for store in [*self.abandoned, self.store]:
                self.run(store.close())
            self.loop.close()
            shutil.rmtree(self.folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["memory", "file", "redis"])
def test_any_sequence_equals_the_model(backend: str, request: pytest.FixtureRequest):
    url = request.getfixturevalue("redis_url") if backend == "redis" else ""
    machine = type("On" + backend, (Sessions,), {"backend": backend, "redis_url": url})
    examples = {"memory": 60, "file": 25, "redis": 15}[backend]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
