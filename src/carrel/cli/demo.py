"""`carrel demo`: the tour. What was said survives a kill; what is known survives worse."""

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

import carrel
from carrel.cli.demo_session import SessionTour
from carrel.cli.demo_story import ENDING, MODEL, PROVIDER, STORY, STORY_ID
from carrel.cli.demo_task import TaskTour
from carrel.cli.exit_codes import TaskFailed, WrongUsage, async_command
from carrel.cli.output import print_text
from carrel.cli.telling import Teller
from carrel.conversation.log_entries import encode
from carrel.conversation.messages import ConversationMessage, blocks_of, meta_of, tool_result_text
from carrel.text import count_messages, readable_size

QUERY = "baking trouble"


@async_command
async def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the sessions and the page in this new folder.")
    ] = None,
) -> None:
    """The tour, offline, in a few seconds.

    A conversation is written by another process, killed in mid-append, recovered, searched, forked, rewound and
    exported to a page. Then an agent's Python calls a tool, saves a workflow and an artifact, installs a package, and
    survives what would end another; and a task is worked on and judged."""
    began = perf_counter()
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise WrongUsage(f"{keep} is there already; --keep wants a new or an empty folder")
    folder = Path(tempfile.mkdtemp(prefix="carrel-demo-")) if keep is None else keep.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print_text(f"A tour of carrel in {folder}", "bold")
        teller = Teller()
        async with carrel.SessionStore(folder / "sessions") as store:
            await Tour(store, folder, teller).take()
        await SessionTour(folder, teller).take()
        await TaskTour(folder, teller).take()
    finally:
        if keep is None:
            shutil.rmtree(folder)
    print_text()
    print_text(f"That took {perf_counter() - began:.1f} seconds.", "bold")
    if keep is None:
        print_text(f"{folder} has been removed; `carrel demo --keep DIR` leaves everything there to look at.")
    else:
        print_text(f"Look around: `carrel sessions list --data {folder / 'sessions'}`, and {folder / 'totals.html'}")


class Tour:
    """One step after another, each on what the one before left."""

    def __init__(self, store: "carrel.SessionStore", folder: Path, teller: Teller) -> None:
        self._store = store
        self._folder = folder
        self._begin, self._tell = teller.begin, teller.tell

    async def take(self) -> None:
        acknowledged = await self._written_and_killed()
        await self._recovered(acknowledged)
        await self._continued()
        await self._searched()
        await self._forked()
        await self._rewound()
        await self._exported()

    async def _written_and_killed(self) -> list[tuple[str, int]]:
        self._begin("Another process writes four conversations, and is killed in mid-append")
        async with writer(self._store.data_dir or self._folder) as process:
            assert process.stdout is not None
            lines = [(line.decode().split(), perf_counter()) async for line in process.stdout]
            code = await process.wait()
        if code != -signal.SIGKILL:
            raise TaskFailed(f"the writer should have been killed, but ended with {code}")
        acknowledged = [(id_, int(seq)) for (id_, seq), _ in lines[1:]]
        took = lines[-1][1] - lines[0][1]
        path = self._store.messages_path(STORY_ID)
        torn = path.read_bytes().rpartition(b"\n")[2]
        self._tell(f"{len(acknowledged)} messages acknowledged in {took * 1000:.0f} ms, then kill -9.")
        self._tell(f"The log now ends in half a line, {readable_size(len(torn))} of it:")
        self._tell(f"… {torn.decode(errors='replace')[-60:]}", "red")
        return acknowledged

    async def _recovered(self, acknowledged: list[tuple[str, int]]) -> None:
        self._begin("The session is opened again")
        began = perf_counter()
        loaded = await self._store.load_session(STORY_ID)
        took = perf_counter() - began
        said = loaded["messages"] if loaded else []
        kept = {
            (id_, seq) for id_ in {id_ for id_, _ in acknowledged} async for seq, _ in self._store.iter_entries(id_)
        }
        lost = [pair for pair in acknowledged if pair not in kept]
        same = [_words(ours) == _words(theirs) for ours, theirs in zip(said, STORY, strict=False)]
        if lost or not all(same) or len(said) != len(STORY) + 1:
            raise TaskFailed(f"acknowledged messages are missing: {lost or 'the words differ'}")
        self._tell(
            f"Opened in {took * 1000:.1f} ms. All {len(acknowledged)} acknowledged messages are there, word for word.",
            "green",
        )
        torn = self._store.session_dir(STORY_ID) / "messages.torn"
        if torn.exists():
            size = readable_size(torn.stat().st_size)
            self._tell(f"The half line was set aside in {torn.name} ({size}); nothing is glued to it.")
        result = blocks_of(said[-1])[0]
        self._tell(
            f"The tool call that never came back was answered, so that a model can go on: “{tool_result_text(result)}”."
        )

    async def _continued(self) -> None:
        self._begin("The conversation goes on")
        began = perf_counter()
        last = await self._store.append_many(STORY_ID, ENDING, provider=PROVIDER, model=MODEL)
        took = perf_counter() - began
        await self._store.label(STORY_ID, "fixed")
        spent = await self._store.usage(STORY_ID)
        self._tell(
            f"{count_messages(len(ENDING))} more in {took * 1000:.1f} ms; the last is entry {last}, labelled “fixed”."
        )
        self._tell(f"So far: {spent.total.input_tokens:,} tokens in, {spent.total.output_tokens:,} out.")

    async def _searched(self) -> None:
        self._begin(f"Searched: “{QUERY}”")
        await self._store.search(QUERY, 1)
        began = perf_counter()
        hits = await self._store.search(QUERY, 1)
        took = perf_counter() - began
        if not hits:
            raise TaskFailed("the search found nothing")
        how = "by what it means: no word is the same" if hits[0].how == "meaning" else "by its words"
        self._tell(f"Found in {took * 1000:.1f} ms, {how}.")
        self._tell(f"{hits[0].session_id}: “{hits[0].snippet}”", "yellow")

    async def _forked(self) -> None:
        self._begin("Another way from an earlier point: a fork")
        began = perf_counter()
        made = await self._store.fork_session(STORY_ID, 4, title="Ask the exporter instead", new_id="demo-fork")
        took = perf_counter() - began
        await self._store.append_message("demo-fork", ENDING[0])
        self._tell(f"Forked at entry 4 in {took * 1000:.1f} ms: {count_messages(len(made['messages']))} came along.")
        self._tell("What is said in one is not in the other, and what was spent before the fork is counted once.")

    async def _rewound(self) -> None:
        self._begin("Back to before the fix: a rewind")
        before = len(await self._visible())
        await self._store.append_rewind(STORY_ID, 4)
        after = len(await self._visible())
        log = [entry async for _, entry in self._store.iter_entries(STORY_ID)]
        self._tell(f"{count_messages(before)} visible before, {after} after. The log still has all {len(log)} entries,")
        self._tell("so nothing is lost, and a rewind can be rewound.")

    async def _visible(self) -> list[ConversationMessage]:
        return [message async for message in self._store.iter_messages(STORY_ID)]

    async def _exported(self) -> None:
        self._begin("A page to read and to pass on")
        page = self._folder / "totals.html"
        page.write_text(await self._store.export(STORY_ID, "html"), encoding="utf-8")
        lines = (await self._store.export(STORY_ID, "jsonl")).count("\n")
        self._tell(f"{page} ({readable_size(page.stat().st_size)}): one file, no script, nothing fetched.")
        self._tell(f"The same session is {lines} JSON lines, or Markdown: `carrel sessions export`.")


def _words(message: ConversationMessage) -> bytes:
    """What was said, without when."""
    meta = {name: value for name, value in meta_of(message).items() if name != "created_at"}
    return encode({**message, "meta": meta})


@asynccontextmanager
async def writer(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The other process; gone in any case when this is left."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "carrel.cli.demo_writer", str(folder)), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
