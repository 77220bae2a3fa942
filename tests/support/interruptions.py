"""Operations on sessions, interrupted at each call that they make to their store."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from carrel.conversation.log_entries import timestamp
from carrel.conversation.models.conversation import Conversation, ConversationStorage
from carrel.conversation.models.info import SessionInfo
from carrel.conversation.models.parts import TextPart
from carrel.conversation.store import SessionStore
from carrel.errors import CarrelError, SessionNotFound, StorageUnavailable
from carrel.storage.base import Block, Lock, Store, process_name
from carrel.storage.memory import MemoryStore
from tests.support.messages import assistant, call, outline, result, user

Picture = dict[str, Any]
Deed = Callable[[], Awaitable[Any]]
Operation = Callable[[SessionStore], Awaitable[Deed]]
"""Gets what it needs, as one who has had the session for a while; what it returns does the deed."""
Cut = Literal["kill", "fault", "fault after", "cancel"]

_WRITES = ("put", "put_pieces", "delete", "copy", "append", "copy_log")
_CALLS = ("get", "get_many", "folders", "stamp", "stamps", "incomplete_tail", "scan", "list", *_WRITES)
_PATIENCE = 60.0


class Killed(BaseException):
    """What a process meets that is no more: no handler, no `finally` of it does anything to the store."""


class Stepped:
    """One process's way to a store that others share; before and after each call something may happen."""

    def __init__(self, inner: Store, holders: dict[str, "Stepped"]) -> None:
        self.inner = inner
        self.steps = 0
        self.before: Callable[[int], Awaitable[None]] | None = None
        self.after: Callable[[int], Awaitable[None]] | None = None
        """Of a call that writes."""
        self.waits = asyncio.Event()
        """Set when it waits for a lock that another holds."""
        self.is_dead = False
        self._holders = holders
        self._held: dict[str, Lock] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(name)
        inner = getattr(self.inner, name)

        async def stepped(*args: Any, **how: Any) -> Any:
            number = await self._step()
            done = await inner(*args, **how)
            if self.after is not None and name in _WRITES:
                await self.after(number)
            return done

        return stepped

    async def _step(self) -> int:
        self.steps += 1
        number = self.steps
        if self.before is not None and not self.is_dead:
            await self.before(number)
        if self.is_dead:
            raise Killed
        return number

    async def read(self, key: str, from_seq: int = 1) -> AsyncIterator[Block]:
        await self._step()
        async for block in self.inner.read(key, from_seq):
            yield block
            await self._step()

    async def read_back(
        self, key: str, before_seq: int | None = None, *, hint: tuple[int, int] | None = None
    ) -> AsyncIterator[Block]:
        await self._step()
        async for block in self.inner.read_back(key, before_seq, hint=hint):
            yield block
            await self._step()

    async def lock(self, key: str, *, wait: bool = True) -> "_Held | None":
        await self._step()
        lock = await self.inner.lock(key, wait=False)
        if lock is None and wait:
            self.waits.set()
            lock = await self.inner.lock(key)
        if lock is None:
            return None
        self._held[key], self._holders[key] = lock, self
        return _Held(self, key, lock)

    async def let_go(self, key: str) -> None:
        lock = self._held.pop(key, None)
        if lock is not None:
            del self._holders[key]
            await lock.release()

    async def lock_owner(self, key: str) -> str | None:
        await self._step()
        held = self._holders.get(key)
        return None if held is None else process_name() if held is self else "elsewhere:1"

    async def close(self) -> None:
        for key in list(self._held):
            await self.let_go(key)

    async def die(self) -> None:
        """Be killed: the locks go, and nothing more is done."""
        self.is_dead = True
        await self.close()


class _Held:
    """A lock, which a process that is killed does not release once more."""

    def __init__(self, way: Stepped, key: str, lock: Lock) -> None:
        self.inner = lock
        self.lost = lock.lost
        self._way = way
        self._key = key

    async def release(self) -> None:
        if not self._way.is_dead:
            await self._way.let_go(self._key)


class Processes:
    """Any number of processes that share a store; `backend` opens it for one of them."""

    def __init__(self, folder: Path, backend: Callable[[], Store]) -> None:
        self.folder = folder
        """Where there are files to import."""
        self._backend = backend
        self._holders: dict[str, Stepped] = {}
        self._opened: list[Store] = []
        self._date = ""

    def backend(self) -> Store:
        self._opened.append(self._backend())
        return self._opened[-1]

    def open(self, name: str) -> tuple[SessionStore, Stepped]:
        way, count = Stepped(self.backend(), self._holders), itertools.count(1)
        store = SessionStore(
            store=way,
            embedder=False,
            new_id=lambda: f"{name}{next(count)}",
            now=lambda: self._date or timestamp(),
        )
        return store, way

    async def begin(self, store: SessionStore) -> None:
        """A few sessions, one of them old, and one from elsewhere."""
        self._date = "2020-01-01T00:00:00+00:00"
        await store.create_session("Base", session_id="s", model="m", cwd="/work")
        await store.append_many("s", [user("one"), assistant("two", usage={"total_tokens": 5}), user("three")])
        await store.set_tags("s", ["old"])
        await store.label("s", "there", at=1)
        self._date = ""
        await store.import_file(self.folder / "brought")
        await store.create_session(session_id="empty")
        talk = Conversation(info=SessionInfo(id="typed", project_dir="/project", working_dir="/project", title="Typed"))
        talk.create_user_message("hello")
        talk.create_assistant_message().add_text("hi")
        talk.create_user_message("go on")
        for number, message in enumerate(talk.messages):
            message.id = f"m{number}"
        await ConversationStorage(store).create(talk)
        await store.close()

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


# --- what is done


def _plain(do: Callable[[SessionStore], Awaitable[Any]]) -> Operation:
    async def ready(store: SessionStore) -> Deed:
        return lambda: do(store)

    return ready


def _typed(do: Callable[[Conversation, ConversationStorage], Any]) -> Operation:
    async def ready(store: SessionStore) -> Deed:
        storage = ConversationStorage(store)
        talk = await storage.get("typed")

        async def deed() -> None:
            if talk is None:
                raise SessionNotFound("typed")
            doing = do(talk, storage)
            await (storage.update(talk) if doing is None else doing)

        return deed

    return ready


async def _sums(messages: Any) -> str:
    return "sum"


async def _drafted(store: SessionStore) -> Deed:
    draft = store.draft_session("Drafted", model="n")["session"]["id"]
    return lambda: store.append_message(draft, user("first"))


def _say(talk: Conversation, _: ConversationStorage) -> None:
    talk.create_user_message("typed").id = "m-new"


def _answer(talk: Conversation, _: ConversationStorage) -> None:
    message = talk.create_assistant_message()
    message.id = "m-call"
    message.add_tool_call("t1", "look", {})
    message.add_tool_result("t1", "found")


def _edit(talk: Conversation, _: ConversationStorage) -> None:
    talk.messages[1].parts[:] = [TextPart(content="edited")]


def _cut(talk: Conversation, _: ConversationStorage) -> None:
    del talk.messages[1:]


def _entitle(talk: Conversation, _: ConversationStorage) -> None:
    talk.update_title("Entitled")


def _import(folder: Path) -> Operation:
    async def do(store: SessionStore) -> None:
        [report] = await store.import_file(folder)
        if report.problems:
            raise CarrelError(report.problems[0])

    return _plain(do)


def operations(folder: Path) -> dict[str, Operation]:
    """All of them, by name; `folder` is where there are files to import."""
    return {
        "append": _plain(lambda store: store.append_message("s", user("more"))),
        "append many": _plain(lambda store: store.append_many("s", [user("much"), assistant("more")])),
        "append the first": _plain(lambda store: store.append_message("empty", user("first"))),
        "append another first": _plain(lambda store: store.append_message("empty", user("other first"))),
        "append to a new one": _plain(lambda store: store.append_message("new", user("first"))),
        "append to a draft": _drafted,
        "append what is long": _plain(lambda store: store.append_message("s", result("x", text="long " * 12_000))),
        "call": _plain(lambda store: store.append_message("s", call("c1"))),
        "call and answer": _plain(lambda store: store.append_many("s", [call("c2"), result("c2")])),
        "rename": _plain(lambda store: store.rename("s", "Named")),
        "rename the empty one": _plain(lambda store: store.rename("empty", "Named")),
        "tag": _plain(lambda store: store.set_tags("s", ["new"])),
        "archive": _plain(lambda store: store.archive("s")),
        "unarchive": _plain(lambda store: store.unarchive("s")),
        "label": _plain(lambda store: store.label("s", "here")),
        "pin": _plain(lambda store: store.pin("s", 1)),
        "set": _plain(lambda store: store.update_meta("s", model="other", mine=1)),
        "rewind": _plain(lambda store: store.append_rewind("s", 1)),
        "rewind to an entry": _plain(lambda store: store.append_rewind("s", to_seq=2)),
        "clear": _plain(lambda store: store.clear_session("s")),
        "compact": _plain(lambda store: store.compact("s", _sums, keep_turns=1)),
        "fork": _plain(lambda store: store.fork_session("s", new_id="fork")),
        "fork to the same name": _plain(lambda store: store.fork_session("s", at=1, new_id="fork", title="Twin")),
        "create": _plain(lambda store: store.create_session("Given", session_id="new", model="m")),
        "delete": _plain(lambda store: store.delete_session("s")),
        "delete the empty one": _plain(lambda store: store.delete_session("empty")),
        "delete the new one": _plain(lambda store: store.delete_session("new")),
        "prune": _plain(lambda store: store.prune(timedelta(days=1), keep_labelled=False, dry_run=False)),
        "load": _plain(lambda store: store.load_session("s")),
        "import": _import(folder / "other"),
        "import more": _import(folder / "grown" / "brought"),
        "say, typed": _typed(_say),
        "answer, typed": _typed(_answer),
        "edit, typed": _typed(_edit),
        "cut, typed": _typed(_cut),
        "entitle, typed": _typed(_entitle),
        "rewind, typed": _typed(lambda talk, storage: storage.rewind(talk, to_seq=1)),
        "delete, typed": _typed(lambda talk, storage: storage.delete(talk.id)),
    }


NAMES = list(operations(Path()))


def write_imports(folder: Path) -> None:
    turns = [user("a"), assistant("b", usage={"total_tokens": 3}), user("c"), assistant("d", usage={"total_tokens": 4})]
    for name, lines in (("brought", turns[:2]), ("grown/brought", turns), ("other", turns)):
        (folder / name).mkdir(parents=True)
        (folder / name / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        meta = {"id": Path(name).name, "title": "From elsewhere", "model": "m"}
        (folder / name / "meta.json").write_text(json.dumps(meta))


# --- what is to be seen


async def seen(store: SessionStore) -> Picture:
    """All that a reader can find out, but for dates; two ways to the same fact must give the same answer."""
    picture: Picture = {}
    storage = ConversationStorage(store)
    infos = {info.id: info for info in await storage.list_infos()}
    for meta in await store.list_sessions():
        id_ = meta["id"]
        data, counted = await store.load_session(id_), await store.read_meta(id_, counts=True)
        assert data is not None
        for one in (data["session"], counted):
            assert _fields(one) == _fields(meta), f"{id_}: {_fields(one)} is read, and {_fields(meta)} is listed"
        picture[id_] = _fields(meta) | {
            "messages": outline(data["messages"]),
            "problems": data.get("problems", []),
            "count": infos[id_].message_count if "project_dir" in meta else counted["message_count"],
            "tokens": counted["total_tokens"],
            "spent": (await store.usage(id_)).total.total_tokens,
            "children": sorted(child["id"] for child in await store.children(id_)),
        }
    return picture


def _fields(meta: Any) -> Picture:
    fields = ("title", "model", "provider", "cwd", "tags", "pins", "parent_session_id", "forked_at_seq", "mine")
    labels = [(label["text"], label["at_seq"]) for label in meta.get("labels", [])]
    return {name: meta.get(name) for name in fields} | {"labels": labels, "archived": bool(meta.get("archived_at"))}


async def picture_of(processes: Processes) -> Picture:
    """As a process sees it that begins now; and the metadata must be what the log says."""
    backend = processes.backend()
    picture = await seen(SessionStore(store=backend, embedder=False))
    copy = MemoryStore()
    for key in await backend.list():
        if key.endswith(".jsonl"):
            await copy.append(key, [record async for block in backend.read(key) for record in block.records])
        elif not key.endswith("/meta.json"):
            await copy.put(key, await backend.get(key) or b"")
    listed = {meta["id"]: _fields(meta) for meta in await SessionStore(store=copy, embedder=False).list_sessions()}
    for id_, there in picture.items():
        if id_ not in listed and not there["messages"]:
            continue  # made in this moment: nothing but its metadata is there
        differs = {name: (there[name], value) for name, value in listed[id_].items() if there[name] != value}
        assert not differs, f"{id_}: what the metadata says, and what the log does: {differs}"
    return picture


def difference(one: Picture, other: Picture) -> str:
    """What is not the same in two pictures, in a few words."""
    words = []
    for id_ in sorted(one.keys() | other.keys()):
        a, b = one.get(id_), other.get(id_)
        if a is None or b is None:
            words += [f"{id_} is {'there' if a is None else 'gone'}"] if a is not b else []
        else:
            words += [f"{id_}: {name} {a[name]!r} is {b[name]!r}" for name in a if a[name] != b[name]]
    return "; ".join(words)[:500] or "nothing"


async def outcome_of(deed: Deed) -> str:
    """The name of its error, or nothing when it was done."""
    try:
        await deed()
    except (Exception, Killed, asyncio.CancelledError) as problem:  # noqa: BLE001 - compared by the caller
        return type(problem).__name__
    return ""


# --- how it is looked at


class Laboratory:
    """Does operations in every way, each time with the same sessions, and says what went wrong."""

    def __init__(self, folder: Path, backend: Callable[[], Callable[[], Store]] | None = None) -> None:
        """`backend` gives, for each try, that by which the processes of the try open their store."""
        write_imports(folder)
        self._folder = folder
        self._backend = backend or self._memory
        self._operations = operations(folder)
        self._done: dict[tuple[tuple[str, str], ...], tuple[Picture, list[str]]] = {}

    def _memory(self) -> Callable[[], Store]:
        memory = MemoryStore()
        return lambda: memory

    @contextlib.asynccontextmanager
    async def _try(self, *, warm: bool) -> AsyncIterator[tuple[Processes, SessionStore, Stepped]]:
        """Process "a", which with `warm` has written to the sessions before and is about to go on."""
        processes = Processes(self._folder, self._backend())
        store, way = processes.open("a" if warm else "z")
        await processes.begin(store)
        if warm:
            for id_ in ("s", "empty", "typed", "brought"):
                await store._logs._open(id_, [], None, store._logs._incarnation(id_))
        else:
            store, way = processes.open("a")
        try:
            yield processes, store, way
        finally:
            await processes.close()

    async def one_after_another(self, *who: tuple[str, str]) -> tuple[Picture, list[str]]:
        """What comes of operations that have nothing to do with each other: the measure of the rest."""
        if who not in self._done:
            processes = Processes(self._folder, self._memory())
            first, _ = processes.open("z")
            await processes.begin(first)
            outcomes = []
            for name, operation in who:
                store, _ = processes.open(name)
                outcomes.append(await outcome_of(await self._operations[operation](store)))
                await store.close()
            self._done[who] = await picture_of(processes), outcomes
        return self._done[who]

    async def together(self, one: str, other: str, *, warm: bool) -> list[str]:
        """While process "a" does the one, process "b" does the other: before each step of "a", one try for each.

        What is to be seen then is what would be if one had come after the other; or one of them gets an error, and
        only the other was done. Who had ended before the other began came first."""
        problems: list[str] = []
        first, second = ("a", one), ("b", other)
        ab, ba = [await self.one_after_another(*who) for who in ((first, second), (second, first))]
        (only_a, [did_a]), (only_b, [did_b]) = [await self.one_after_another(who) for who in (first, second)]
        for point in itertools.count():
            async with self._try(warm=warm) as (processes, store, way), asyncio.timeout(_PATIENCE):
                deed = await self._operations[one](store)
                other_ends: list[asyncio.Task[str]] = []

                async def begin_other(
                    number: int, point: int = point, processes: Any = processes, ends: Any = other_ends
                ) -> None:
                    if number == point and not ends:
                        ends.append(await self._begun(processes, other))

                way.steps, way.before = 0, begin_other
                await begin_other(0)
                a = await outcome_of(deed)
                await store.close()
                came_last = not other_ends
                if came_last:
                    other_ends.append(await self._begun(processes, other))
                b = await other_ends[0]
                where = f"{one} × {other}, step {point}{' (warm)' if warm else ''}"
                try:
                    picture = await picture_of(processes)
                except AssertionError as problem:
                    problems.append(f"{where}: {problem}")
                    picture = None
            allowed = [(only_a, did_a, b)] * bool(b) + [(only_b, a, did_b)] * bool(a)
            allowed += [(ab[0], ab[1][0], ab[1][1])] * (point > 0)
            allowed += [(ba[0], ba[1][1], ba[1][0])] * (not came_last)
            if picture is not None and (picture, a, b) not in allowed:
                nearest = min((difference(there, picture) for there, *_ in allowed), key=len)
                problems.append(f"{where}: {a or 'done'} and {b or 'done'}; {nearest}")
            if came_last:
                return problems
        raise AssertionError

    async def _begun(self, processes: Processes, operation: str) -> "asyncio.Task[str]":
        """Process "b" at work, until it has ended or waits for a lock."""
        store, way = processes.open("b")

        async def work() -> str:
            outcome = await outcome_of(await self._operations[operation](store))
            await store.close()
            return outcome

        working, waiting = asyncio.create_task(work()), asyncio.create_task(way.waits.wait())
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return working

    async def cut_off(self, operation: str, how: Cut, *, warm: bool) -> list[str]:
        """Process "a" is cut off at each of its steps, and then the same is done by another.

        What is to be seen is what was before or what comes of it, and the second time it is done."""
        problems: list[str] = []
        old, _ = await self.one_after_another()
        new, _ = await self.one_after_another(("a", operation))
        twice, _ = await self.one_after_another(("a", operation), ("a", operation))
        for point in itertools.count(1):
            async with self._try(warm=warm) as (processes, store, way), asyncio.timeout(_PATIENCE):
                is_cut = await self._cut(operation, how, point, store, way)
                if is_cut is None:
                    return problems
                where = f"{operation}, {how} at step {point}{' (warm)' if warm else ''}"
                try:
                    picture = await picture_of(processes)
                    if picture != new and (picture != old or not is_cut):
                        nearest = min((difference(there, picture) for there in (old, new)), key=len)
                        problems.append(f"{where}: {nearest}")
                        continue
                    again, _ = processes.open("a")
                    await outcome_of(await self._operations[operation](again))
                    await again.close()
                    picture = await picture_of(processes)
                    if picture not in (new, twice):
                        problems.append(f"{where}, and once more: {difference(new, picture)}")
                except AssertionError as problem:
                    problems.append(f"{where}: {problem}")
        raise AssertionError

    async def _cut(self, operation: str, how: Cut, point: int, store: SessionStore, way: Stepped) -> bool | None:
        """Whether it got an error; None when it has ended before that step."""
        deed = await self._operations[operation](store)
        doing = asyncio.ensure_future(outcome_of(deed))
        happened = False

        async def happen(number: int) -> None:
            nonlocal happened
            if number < point or happened:
                return
            happened = True
            if how == "kill":
                await way.die()
            elif how == "cancel":
                doing.cancel()
            else:
                raise StorageUnavailable("gone")

        way.steps = 0
        if how == "fault after":
            way.after = happen
        else:
            way.before = happen
        [outcome] = await asyncio.gather(doing, return_exceptions=True)
        if happened or how != "cancel":
            with contextlib.suppress(Killed, StorageUnavailable):
                await store.close()
        # What goes on by itself: the metadata, which no task waits for any more.
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        return bool(outcome) if happened else None

    async def looked_at(self, operation: str, *, warm: bool) -> list[str]:
        """Before each step of process "a" others look: one that begins then, and one that has looked all along."""
        problems: list[str] = []
        old, _ = await self.one_after_another()
        new, _ = await self.one_after_another(("a", operation))
        async with self._try(warm=warm) as (processes, store, way), asyncio.timeout(_PATIENCE):
            deed = await self._operations[operation](store)
            watching = SessionStore(store=processes.backend(), embedder=False)

            async def look(number: int, there: tuple[Picture, ...] = (old, new)) -> None:
                for who in (watching, SessionStore(store=processes.backend(), embedder=False)):
                    where = f"{operation}, step {number}, {'watched' if who is watching else 'looked at'}"
                    try:
                        picture = await seen(who)
                    except AssertionError as problem:
                        problems.append(f"{where}: {problem}")
                        continue
                    if picture not in there:
                        problems.append(f"{where}: {min((difference(each, picture) for each in there), key=len)}")

            await look(0, (old,))
            way.steps, way.before = 0, look
            await outcome_of(deed)
            await store.close()
            await look(-1, (new,))
        return problems
