"""A program that does whatever one can do to shared sessions, at random, and notes down what was acknowledged.

Each line of its stdin is the settings (JSON) of one more process, whose number it prints."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from carrel.conversation.messages import (
    assistant_message,
    build_message,
    text_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.conversation.store import SessionStore
from carrel.errors import (
    CompactRefused,
    RewindRefused,
    SessionExists,
    SessionNotFound,
    StorageError,
)
from carrel.storage.redis.store import RedisStore

EXPECTED = (CompactRefused, RewindRefused, SessionExists, SessionNotFound)


class Chaos:
    """One process at work, in a few tasks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.name = settings["name"]
        self.dice = random.Random(settings["seed"])
        self.notes = os.open(settings["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.count = 0
        self.store = self._opened()

    def _opened(self) -> SessionStore:
        how: dict[str, Any] = {"durability": self.settings["durability"], "embedder": False, "now": self._now}
        if self.settings["kind"] == "redis":
            place, prefix = self.settings["place"]
            return SessionStore(store=RedisStore(place, prefix), **how)
        return SessionStore(self.settings["place"], **how)

    def _now(self) -> str:
        """A clock that goes wrong: it is set back and forth by up to so many seconds."""
        skew = self.settings["skew"]
        return (datetime.now(UTC) + timedelta(seconds=self.dice.uniform(-skew, skew))).isoformat()

    def note(self, **what: Any) -> None:
        """One write, so that it is there however soon we are killed."""
        os.write(self.notes, json.dumps({"who": self.name, "at": time.monotonic(), **what}).encode() + b"\n")

    def session(self) -> str:
        names = self.settings["kept"] if self.dice.random() < 0.75 else self.settings["passing"]
        return self.dice.choice(names)

    def token(self, task: int) -> str:
        self.count += 1
        return f"{self.name}t{task}n{self.count}"

    async def work(self, task: int) -> None:
        until = time.monotonic() + self.settings["seconds"]
        weights = {name: weight for name, weight in self.settings["weights"].items() if weight}
        while time.monotonic() < until:
            [name] = self.dice.choices(list(weights), list(weights.values()))
            do: Callable[..., Awaitable[dict[str, Any]]] = getattr(self, name)
            token, session = self.token(task), self.session()
            self.note(begin=name, token=token, session=session)
            try:
                done = await do(task, session) if name == "tail" else await do_with(do, token, session)
            except EXPECTED as problem:
                self.note(refused=name, token=token, session=session, why=f"{type(problem).__name__}: {problem}")
            except StorageError as problem:
                self.note(failed=name, token=token, session=session, why=f"{type(problem).__name__}: {problem}")
                await asyncio.sleep(0.02)
            except TimeoutError:
                self.note(late=name, token=token, session=session)
            except Exception as problem:  # noqa: BLE001  whatever it is, it must not be
                self.note(wrong=name, token=token, session=session, why=f"{type(problem).__name__}: {problem}")
            else:
                self.note(done=name, token=token, session=session, **done)

    # --- what one can do --------------------------------------------------------------------------------------------

    async def append(self, token: str, session: str) -> dict[str, Any]:
        size = self.dice.choice([0, 10, 300, 3000, 5000])
        return {"seq": await self.store.append_message(session, user_text_message(f"{token} {'x' * size}"))}

    async def append_answer(self, token: str, session: str) -> dict[str, Any]:
        message = assistant_message([text_block(f"{token} ")], model="m", usage={"input_tokens": 3, "output_tokens": 4})
        return {"seq": await self.store.append_message(session, message)}

    async def append_long(self, token: str, session: str) -> dict[str, Any]:
        text = f"{token} " + "long " * self.dice.choice([12_000, 30_000])
        call = assistant_message([tool_use_block(tool_id=token, name="cat", input={})])
        result = build_message("user", [tool_result_block(tool_use_id=token, model_text=text)])
        return {"seq": await self.store.append_many(session, [call, result]) - 1}

    async def append_many(self, token: str, session: str) -> dict[str, Any]:
        size = self.dice.choice([10, 700, 20_000])
        many = [user_text_message(f"{token}-{number} {'y' * size}") for number in range(self.dice.choice([2, 5, 40]))]
        return {"seq": await self.store.append_many(session, many), "many": len(many)}

    async def call_tool(self, token: str, session: str) -> dict[str, Any]:
        call = assistant_message([tool_use_block(tool_id=token, name="slow", input={})])
        seq = await self.store.append_message(session, call)
        await asyncio.sleep(self.dice.uniform(0, 0.02))
        result = build_message("user", [tool_result_block(tool_use_id=token, model_text=f"{token} is done")])
        await self.store.append_message(session, result)
        return {"seq": seq}

    async def rewind(self, token: str, session: str) -> dict[str, Any]:
        if self.dice.random() < 0.5:
            last = await self.store.last_seq(session)
            return {"seq": await self.store.append_rewind(session, to_seq=self.dice.randint(max(0, last - 9), last))}
        data = await self.store.load_session(session)
        shown = len(data["messages"]) if data else 0
        return {"seq": await self.store.append_rewind(session, self.dice.randint(max(0, shown - 5), shown))}

    async def compact(self, token: str, session: str) -> dict[str, Any]:
        async def summarize(messages: list[Any]) -> Any:
            await asyncio.sleep(self.dice.uniform(0, 0.01))
            return f"sum {token} ", {"input_tokens": 5}

        await self.store.compact(session, summarize, keep_turns=self.dice.randint(0, 3))
        return {}

    async def fork(self, token: str, session: str) -> dict[str, Any]:
        last = await self.store.last_seq(session)
        at = self.dice.choice([None, self.dice.randint(0, last)])
        data = await self.store.fork_session(session, at, new_id=f"f{token}")
        return {"fork": data["session"]["id"], "place": data["session"].get("forked_at_seq")}

    async def label(self, token: str, session: str) -> dict[str, Any]:
        return {"place": await self.store.label(session, f"label {token}")}

    async def rename(self, token: str, session: str) -> dict[str, Any]:
        return {"title": (await self.store.rename(session, f"title {token}"))["title"]}

    async def tag(self, token: str, session: str) -> dict[str, Any]:
        await self.store.set_tags(session, [token])
        return {}

    async def archive(self, token: str, session: str) -> dict[str, Any]:
        await (self.store.archive(session) if self.dice.random() < 0.5 else self.store.unarchive(session))
        return {}

    async def search(self, token: str, session: str) -> dict[str, Any]:
        await self.store.search(self.dice.choice(["sum", "title", "x", '"is done"', "n1* NEAR/"]))
        return {}

    async def look(self, token: str, session: str) -> dict[str, Any]:
        await self.store.load_session(session)
        await self.store.list_sessions(counts=self.dice.random() < 0.3)
        return {}

    async def export(self, token: str, session: str) -> dict[str, Any]:
        await self.store.export(session, self.dice.choice(["jsonl", "markdown", "html"]))
        return {}

    async def usage(self, token: str, session: str) -> dict[str, Any]:
        await self.store.usage(session)
        return {}

    async def delete(self, token: str, session: str) -> dict[str, Any]:
        gone = self.dice.choice(self.settings["passing"])
        self.note(deleting=gone, token=token)
        there = await self.store.delete_session(gone)
        self.note(deleted=gone, token=token, there=there)
        return {}

    async def prune(self, token: str, session: str) -> dict[str, Any]:
        await self.store.prune(timedelta(hours=1), dry_run=False)
        return {}

    async def give_up(self, token: str, session: str) -> dict[str, Any]:
        """Something, cancelled at some moment."""
        do = self.dice.choice([self.append, self.rename, self.label, self.append_many, self.fork, self.compact])
        async with asyncio.timeout(self.dice.choice([0, 0.0005, 0.002, 0.01])):
            return {"instead": do.__name__, **await do(token, session)}

    async def reopen(self, token: str, session: str) -> dict[str, Any]:
        await self.store.close()
        return {}

    async def tail(self, task: int, session: str) -> dict[str, Any]:
        """Follow it for a moment: every number in its turn."""
        begin = seq = self.dice.randint(1, 20)
        followed = aiter(self.store.tail(session, begin))
        try:
            async with asyncio.timeout(0.05):
                async for number, _ in followed:
                    assert number == seq, f"tail of {session} gave {number} where {seq} was next"
                    seq += 1
        except TimeoutError:
            pass
        finally:
            await followed.aclose()  # type: ignore[attr-defined]
        return {"followed": seq - begin}


async def do_with(do: Callable[[str, str], Awaitable[dict[str, Any]]], token: str, session: str) -> dict[str, Any]:
    return await do(token, session)


async def main(settings: dict[str, Any]) -> None:
    chaos = Chaos(settings)
    await asyncio.gather(*(chaos.work(task) for task in range(settings["tasks"])))
    await chaos.store.close()
    chaos.note(ended=True)


if __name__ == "__main__":
    # Forked from one that has loaded everything: those who are killed are followed at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asyncio.run(main(json.loads(line)))
            os._exit(0)
        print(child, flush=True)
