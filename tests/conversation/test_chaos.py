"""Several processes do everything at once to a few sessions and are killed at random: nothing acknowledged is lost."""

import asyncio
import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.log_entries import note_kind
from carrel.conversation.messages import ConversationMessage, flatten_message_text, meta_of, tool_calls_of
from carrel.conversation.session_writer import call_key
from carrel.conversation.store import SessionStore
from carrel.conversation.usage import tokens_of
from carrel.storage.redis.store import RedisStore
from tests.support.real_redis import RealRedis

PROGRAM = "tests.support.chaos_process"
KEPT = ["k0", "k1", "k2"]
PASSING = ["d0", "d1"]
WEIGHTS = {
    "append": 30, "append_answer": 8, "append_long": 2, "append_many": 6, "call_tool": 4, "rewind": 5, "compact": 3,
    "fork": 2, "label": 3, "rename": 3, "tag": 2, "archive": 2, "search": 2, "look": 4, "export": 1, "usage": 1,
    "delete": 2, "prune": 1, "give_up": 6, "reopen": 1, "tail": 2,
}  # fmt: skip


@dataclass
class Crowd:
    """The processes at work on one place."""

    folder: Path
    settings: dict[str, Any]
    dice: random.Random
    running: list[int] = field(default_factory=list)
    started: int = 0
    spawner: subprocess.Popen[bytes] | None = None

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def start(self) -> None:
        if self.spawner is None:
            with (self.folder / "errors").open("ab") as errors:
                pipe = subprocess.PIPE
                self.spawner = subprocess.Popen([sys.executable, "-m", PROGRAM], stdin=pipe, stdout=pipe, stderr=errors)
        assert self.spawner.stdin is not None
        assert self.spawner.stdout is not None
        self.started += 1
        settings = self.settings | {"name": f"p{self.started}", "seed": self.dice.random(), "notes": str(self.notes)}
        self.spawner.stdin.write(json.dumps(settings).encode() + b"\n")
        self.spawner.stdin.flush()
        self.running.append(int(self.spawner.stdout.readline()))

    def kill(self) -> None:
        process = self.running.pop(self.dice.randrange(len(self.running)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        wait_for_end(process)

    def stop_for(self, seconds: float) -> None:
        process = self.dice.choice(self.running)
        os.kill(process, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)

    def end(self) -> None:
        while self.running:
            self.kill()
        if self.spawner is not None:
            self.spawner.kill()
            self.spawner.communicate()


def wait_for_end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.005)


def model(entries: list[tuple[int, ConversationMessage]]) -> list[str]:
    """What is visible, the simple way: from the first entry on, with every moment remembered."""
    shown: list[tuple[int, str]] = []
    moments: list[list[tuple[int, str]]] = [[]]
    for seq, entry in entries:
        meta = meta_of(entry)
        if entry["role"] == "compact":
            text = flatten_message_text(entry)
            kept = [(number, text) for number, text in shown if number >= meta["keep_from_seq"]]
            shown = [(0, f"[Conversation Summary]\n\n{text}"), (0, "ack"), *kept]
        elif entry["role"] == "rewind" and "to_seq" in meta:
            shown = moments[meta["to_seq"]]
        elif entry["role"] == "rewind":
            shown = shown[: meta["rewind_to"]]
        else:
            shown = [*shown, (seq, shown_text(entry))]
        moments.append(shown)
    return [text for _, text in shown]


def shown_text(entry: ConversationMessage) -> str:
    if entry["role"] == "assistant" and meta_of(entry).get("synthetic"):
        return "ack"
    return flatten_message_text(entry) or json.dumps(entry["content"])


async def check(store: SessionStore, notes: list[dict[str, Any]], *, lossy: bool = False) -> None:
    """Everything that must hold once all processes have ended."""
    assert not [note for note in notes if "wrong" in note]
    deleted = deletions(notes)
    logs: dict[str, list[tuple[int, ConversationMessage]]] = {}
    listed = {meta["id"]: meta for meta in await store.list_sessions(counts=True)}
    for session in listed:
        logs[session] = [pair async for pair in store.iter_entries(session)]
        assert [seq for seq, _ in logs[session]] == list(range(1, len(logs[session]) + 1))
        assert not [entry for _, entry in logs[session] if entry["role"] == "unreadable"]
    if not lossy:
        check_acknowledged(logs, notes, deleted)
    for session, entries in logs.items():
        await check_session(store, session, entries, listed[session], lossy or session in deleted)
    for session in logs:
        children = {meta["id"] for meta in await store.children(session)}
        assert children == {id_ for id_, entries in logs.items() if parent_of(entries) == session}
    check_metadata(logs, listed, notes)


def check_metadata(logs: dict[str, Any], listed: dict[str, Any], notes: list[dict[str, Any]]) -> None:
    acknowledged = {note["token"] for note in notes if "done" in note}
    for session, entries in logs.items():
        meta = listed[session]
        labels = Counter(label["text"] for label in meta.get("labels", []))
        in_log = Counter(meta_of(entry)["text"] for _, entry in entries if note_kind(entry) == "label")
        assert not labels - in_log, (session, labels - in_log)
        missing = [text for text in in_log - labels if text.split()[1] in acknowledged]
        assert not missing, (session, missing)
        updates = [meta_of(entry)["set"] for _, entry in entries if note_kind(entry) == "meta"]
        titles = [fields["title"] for fields in updates if "title" in fields]
        if titles and titles[-1].split()[-1] in acknowledged:
            assert meta["title"] == titles[-1], session
        tags = [fields["tags"] for fields in updates if "tags" in fields]
        if tags and tags[-1][0] in acknowledged:
            assert meta["tags"] == tags[-1], session


def parent_of(entries: list[tuple[int, ConversationMessage]]) -> str | None:
    forks = [meta_of(entry)["parent_session_id"] for _, entry in entries if note_kind(entry) == "fork"]
    return forks[-1] if forks else None


def deletions(notes: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """When each session was being deleted; one that did not come to its end may have happened at any moment after."""
    ends = {note["token"]: note["at"] for note in notes if "deleted" in note}
    found: dict[str, list[tuple[float, float]]] = {}
    for note in notes:
        if "deleting" in note:
            found.setdefault(note["deleting"], []).append((note["at"], ends.get(note["token"], float("inf"))))
    return found


def check_acknowledged(logs: dict[str, Any], notes: list[dict[str, Any]], deleted: dict[str, Any]) -> None:
    begun = {note["token"]: note["at"] for note in notes if "begin" in note}
    places: dict[str, dict[str, list[int]]] = {}
    for session, entries in logs.items():
        there = places.setdefault(session, {})
        own = parent_of(entries) is None
        for seq, entry in entries if own else []:
            for token in tokens_in(entry):
                there.setdefault(token, []).append(seq)
    for session, there in places.items():
        twice = {token: seqs for token, seqs in there.items() if len(seqs) > 1}
        assert not twice, (session, twice)
        # In the order in which each writer appended them.
        for writer in {token.partition("n")[0] for token in there}:
            mine = [(seqs[0], token) for token, seqs in there.items() if token.partition("n")[0] == writer]
            numbers = [tuple(map(int, token.partition("n")[2].split("-"))) for _, token in sorted(mine)]
            assert numbers == sorted(numbers), (session, writer)
    for note in notes:
        if "done" not in note or not str(note.get("instead", note["done"])).startswith(("append", "call")):
            continue
        session, token = note["session"], note["token"]
        if any(end >= begun[token] for _, end in deleted.get(session, ())):
            continue
        many = note.get("many")
        for number in range(many or 1):
            name = f"{token}-{number}" if many else token
            seq = note["seq"] - (many - 1 - number if many else 0)
            assert seq in places.get(session, {}).get(name, []), (session, name, seq, note)
    for session, there in places.items():
        # All of a batch, or nothing of it.
        parts = Counter(token.partition("-")[0] for token in there if "-" in token)
        assert set(parts.values()) <= {2, 5, 40}, (session, parts)


def tokens_in(entry: ConversationMessage) -> list[str]:
    """What a writer calls this entry."""
    if entry["role"] not in ("user", "assistant"):
        return []
    for block in entry["content"]:
        if block["type"] == "tool_use":
            return [block["id"]]
        if block["type"] == "text":
            return [block["text"].split(" ")[0]]
    return []


async def check_session(store: SessionStore, session: str, entries: list[Any], meta: Any, may_be_old: bool) -> None:
    wanted = model(entries)
    shown = [shown_text(message) async for message in store.iter_messages(session)]
    assert shown == wanted, session
    assert meta["message_count"] == len(wanted), session
    own = max((seq for seq, entry in entries if note_kind(entry) == "fork"), default=0)
    spent = sum(tokens_of(meta_of(entry).get("usage")).total_tokens for seq, entry in entries if seq > own)
    assert meta["total_tokens"] == spent, session
    assert (await store.usage(session)).total.total_tokens == spent, session
    followed: list[Any] = []
    tail: Any = store.tail(session)
    async with contextlib.aclosing(tail) as live:
        while len(followed) < len(entries):
            async with asyncio.timeout(60):
                followed.append(await anext(live))
    assert followed == entries
    loaded = await store.load_session(session)
    assert loaded is not None
    calls = [call_key(session, id_) for _, entry in entries for id_ in tool_calls_of(entry)]
    for key in [*(f"{session}/{name}" for name in ("life", "meta", "cut")), *calls]:
        held = await store._logs.store.lock(key, wait=False)
        assert held is not None, f"{key} is held by {await store._logs.store.lock_owner(key)}"
        await held.release()
    newest = next((entry for _, entry in reversed(entries) if entry["role"] == "user" and tokens_in(entry)), None)
    if newest is not None:
        [token] = tokens_in(newest)
        assert await store.search(f'"{token}"', limit=50), (session, token)


def read_notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def tear(folder: Path, dice: random.Random) -> None:
    """What a writer leaves that is killed in the middle of a line."""
    path = folder / dice.choice(KEPT) / "messages.jsonl"
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.seek(0, os.SEEK_END)
        log.write(b'{"role":"user","content":[{"type":"te')


def disturb(crowd: Crowd, seconds: float, *others: Callable[[], None]) -> None:
    """Kill, stop and whatever else there is, at random, and have them followed by others."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(crowd.dice.uniform(0.05, crowd.settings["pause"]))
        what = crowd.dice.choice([crowd.kill, crowd.kill, lambda: crowd.stop_for(crowd.dice.uniform(0.2, 2)), *others])
        what()
        while len(crowd.running) < crowd.settings["processes"]:
            crowd.start()


@contextlib.contextmanager
def crowd_at(folder: Path, seed: int, **settings: Any) -> Iterator[Crowd]:
    folder.mkdir(exist_ok=True)
    default = {
        "durability": "os", "seconds": 600, "kept": KEPT, "passing": PASSING, "skew": 100, "weights": WEIGHTS,
        "tasks": 2, "processes": 4, "pause": 1.0,
    }  # fmt: skip
    crowd = Crowd(folder, default | settings, random.Random(seed))
    try:
        for _ in range(crowd.settings["processes"]):
            crowd.start()
        yield crowd
    finally:
        crowd.end()


def fill(folder: Path, dice: random.Random) -> None:
    """Have no room for a while."""
    filler = folder / ".filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"z" * 65536)
    time.sleep(dice.uniform(0.1, 1))
    filler.unlink()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own, which is soon full."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "carrel-chaos", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def run_on_files(tmp_path: Path, seconds: float, seed: int, durability: str, *, small: bool = False) -> None:
    (folder := tmp_path / "sessions").mkdir()
    with small_disk(folder) if small else contextlib.nullcontext():
        with crowd_at(tmp_path, seed, kind="file", place=str(folder), durability=durability) as crowd:
            others = [lambda: fill(folder, crowd.dice)] if small else []
            disturb(crowd, seconds, lambda: tear(folder, crowd.dice), *others)
        async with SessionStore(folder, embedder=False) as store:
            await check(store, read_notes(crowd.notes))
    assert "Traceback" not in (tmp_path / "errors").read_text()


async def test_killed_at_random_what_was_acknowledged_is_there(tmp_path: Path):
    await run_on_files(tmp_path, 4, seed=1, durability="os")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("small", [False, True], ids=["room", "small"])
@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_chaos_on_files(tmp_path: Path, seed: int, durability: str, small: bool):
    await run_on_files(tmp_path, 30, seed, durability, small=small)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("keeps", [True, False], ids=["aof", "memory"])
async def test_chaos_on_redis(tmp_path: Path, start_redis: Callable[..., RealRedis], seed: int, keeps: bool):
    server = start_redis(**({"appendonly": "yes", "appendfsync": "always"} if keeps else {}))

    def restart() -> None:
        server.kill()
        time.sleep(crowd.dice.uniform(0, 0.5))
        server.start()

    def pause() -> None:
        server.pause()
        time.sleep(crowd.dice.uniform(0.1, 1.5))
        server.resume()

    # Fewer are killed: the lock of one who died lives for six seconds more.
    with crowd_at(tmp_path, seed, kind="redis", place=[server.url, "chaos"], pause=6) as crowd:
        disturb(crowd, 30, restart, pause)
    await asyncio.sleep(7)
    async with SessionStore(store=RedisStore(server.url, "chaos"), embedder=False) as store:
        await check(store, read_notes(crowd.notes), lossy=not keeps)
    assert "Traceback" not in (tmp_path / "errors").read_text()
