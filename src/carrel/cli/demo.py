"""`carrel demo`: a tour of eight steps, offline, in a temporary folder."""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

import carrel
from carrel.cli.exit_codes import TaskFailed, WrongUsage
from carrel.cli.options import RUN, command
from carrel.cli.output import print_indented, print_text, safe_text
from carrel.conversation.messages import blocks_of, tool_result_text
from carrel.text import count_messages, readable_size

app = typer.Typer()

TOOL = """\
name: weather
description: The weather of a town, as text
command: echo sunny in
schema:
  positional:
    - {name: town, type: string, required: true, description: Name of the town}
"""

WORKFLOW = '''\
"""Ask for the weather of several towns at once."""

import asyncio

async def run(towns: list[str]) -> list[str]:
    texts = await asyncio.gather(*[tools.weather.call_async(town=town) for town in towns])
    return [text.strip() for text in texts]
'''

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "bread": [
        carrel.user_text_message("My sourdough loaf is dense and flat. What went wrong?"),
        carrel.assistant_message([carrel.text_block("The dough had too little time to rise. Wait until it doubles.")]),
    ],
    "totals": [
        carrel.user_text_message("Since Monday `totals.csv` is one row short. Why?"),
        carrel.assistant_message([carrel.text_block("`rows[1:-1]` drops the header **and the last row**.")]),
        carrel.user_text_message("Then fix it, and run the tests."),
        carrel.assistant_message(
            [
                carrel.text_block("I change that line and run the tests."),
                carrel.tool_use_block(tool_id="call-1", name="run_command", input={"command": "pytest -q"}),
            ]
        ),
    ],
}

WRITER = """\
import asyncio, json, os, signal, sys
import carrel

async def main():
    store = carrel.SessionStore(sys.argv[1])
    for session_id, messages in json.loads(sys.argv[2]).items():
        for message in messages:
            seq = await store.append_message(session_id, message, provider="demo", model="demo-model")
            print(session_id, seq, flush=True)
    with open(store.messages_path(session_id), "ab", buffering=0) as log:
        log.write(b'{"role": "user", "content": [{"type": "tool_result", "tool_u')
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""A process that appends messages, reports each acknowledged one, and is killed while it writes the next line."""


@command(app, "demo", panel=RUN, example="carrel demo")
async def demo(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Keep all files in this new folder.")
    ] = None,
) -> None:
    """Take a tour of carrel, offline, in a few seconds."""
    started = perf_counter()
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise WrongUsage(f"{output} exists; --output needs a new or an empty folder")
    folder = Path(tempfile.mkdtemp(prefix="carrel-demo-")) if output is None else output.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print_text(f"A tour of carrel in {folder}", "bold")
        await Tour(folder).run()
    finally:
        if output is None:
            shutil.rmtree(folder)
    print_text()
    print_text(f"That took {perf_counter() - started:.1f} seconds.", "bold")
    if output is None:
        print_text(f"{folder} has been removed; `carrel demo --output DIR` keeps all files.")
    else:
        print_text(f"Look around: carrel sessions list --base {folder}")


class Tour:
    """The steps of the tour; each one checks what it claims."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = 0

    async def run(self) -> None:
        (self._folder / "tools").mkdir(exist_ok=True)
        (self._folder / "tools" / "weather.yaml").write_text(TOOL, encoding="utf-8")
        async with carrel.Session.from_base(self._folder) as session:
            await self._run_code(session)
            await self._use_library(session)
            await self._survive_failures(session)
            if session.supports("rewind"):
                await self._fork_and_rewind(session)
            await self._read_trace(session)
        async with carrel.SessionStore(self._folder / "sessions") as store:
            await self._recover_conversation(store)
            await self._search_and_export(store)
        await self._verify_task()

    def _begin(self, title: str) -> None:
        self._step += 1
        print_text()
        print_text(f"{self._step}  {title}", "bold cyan")

    def _say(self, text: str, style: str = "") -> None:
        print_indented(safe_text(text, style), 3)

    async def _value(self, session: "carrel.Session", code: str) -> Any:
        result = await session.run(code)
        if result.error is not None:
            raise TaskFailed(f"the code of the tour failed: {result.error}")
        return result.value

    async def _run_code(self, session: "carrel.Session") -> None:
        self._begin("A session runs Python, and its variables persist")
        await self._value(session, "towns = ['Oslo', 'Porto']")
        self._say(
            f"towns = ['Oslo', 'Porto']; then [t.upper() for t in towns] is "
            f"{await self._value(session, '[t.upper() for t in towns]')}"
        )
        active = sorted(session.supported_capabilities() & {"filesystem_isolation", "process_isolation", "fork"})
        self._say(f"Active protections and features: {', '.join(active) or 'none'}.")

    async def _use_library(self, session: "carrel.Session") -> None:
        self._begin("Code calls tools; what worked is saved as a workflow")
        text = await self._value(session, "tools.weather(town=towns[0])")
        self._say(f"A tool, defined in six lines of YAML: tools.weather(town='Oslo') is {text.strip()!r}.")
        await session.add_workflow("forecast", WORKFLOW, "Ask for the weather of several towns at once")
        value = await self._value(session, "workflows.forecast(towns=towns)")
        self._say(f"A workflow calls it for all towns at once: {value}.")
        await self._value(session, "artifacts.save('towns.json', towns)")
        self._say("An artifact, towns.json, is an ordinary file for this session and later ones.")

    async def _survive_failures(self, session: "carrel.Session") -> None:
        self._begin("Failures do not lose the variables")
        endless = await session.run("while True: pass", timeout=0.3)
        self._say(f"`while True: pass` was interrupted ({endless.error_type}); variables: {endless.state}.")
        crashed = await session.run("import os\nos._exit(1)")
        self._say(f"`os._exit(1)` ended the interpreter ({crashed.error_type}); variables: {crashed.state}.")
        refused = await session.run("open('/etc/shadow').read()")
        self._say(f"Reading a secret of the host: {(refused.error or 'it was allowed').splitlines()[-1]}")
        self._say(f"towns is still {await self._value(session, 'towns')}.", "green")

    async def _fork_and_rewind(self, session: "carrel.Session") -> None:
        self._begin("Fork a session, and return to a checkpoint")
        await session.write_file("plan.txt", "first Oslo")
        point = await session.checkpoint("before")
        branch = await session.fork()
        await self._value(branch, "towns.append('Rome')")
        self._say(f"A fork is another live session; there, towns becomes {await self._value(branch, 'towns')}.")
        await branch.close()
        await self._value(session, "towns.clear()\nopen('plan.txt', 'w').write('stay at home')")
        started = perf_counter()
        await session.rewind(point)
        took = perf_counter() - started
        value = await self._value(session, "towns, open('plan.txt').read()")
        self._say(f"The session clears towns and plan.txt, and rewinds in {took * 1000:.0f} ms: {value}.", "green")

    async def _read_trace(self, session: "carrel.Session") -> None:
        self._begin("Everything is in the trace")
        steps = await session.trace()
        kinds = {kind: sum(step["kind"] == kind for step in steps) for kind in dict.fromkeys(s["kind"] for s in steps)}
        self._say(f"{len(steps)} steps: {', '.join(f'{count} × {kind}' for kind, count in kinds.items())}.")
        self._say("`carrel sessions trace` shows them with times, outcomes and sizes.")

    async def _recover_conversation(self, store: "carrel.SessionStore") -> None:
        self._begin("A conversation survives a kill while it is written")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WRITER, str(store.data_dir), json.dumps(CONVERSATIONS)),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != -signal.SIGKILL:
            raise TaskFailed(f"the writing process should have been killed, but ended with {process.returncode}")
        acknowledged = {(id_, int(seq)) for id_, seq in (line.split() for line in printed.decode().splitlines())}
        self._say(f"Another process appended {len(acknowledged)} messages and was killed in the middle of a line.")
        loaded = await store.load_session("totals")
        stored = {(id_, seq) for id_ in CONVERSATIONS async for seq, _ in store.iter_entries(id_)}
        if loaded is None or not acknowledged <= stored:
            raise TaskFailed(f"acknowledged messages are missing: {sorted(acknowledged - stored)}")
        self._say(f"All {len(acknowledged)} acknowledged messages are there; the half line was set aside.", "green")
        answer = tool_result_text(blocks_of(loaded["messages"][-1])[0])
        self._say(f"The tool call without a result got one, so that a model can continue: “{answer}”.")

    async def _search_and_export(self, store: "carrel.SessionStore") -> None:
        self._begin("Search, rewind and export conversations")
        hits = await store.search("baking trouble", 1)
        if not hits:
            raise TaskFailed("the search found nothing")
        self._say(f"A search for “baking trouble” finds, by {hits[0].how}: “{hits[0].snippet}”")
        await store.append_rewind("totals", 2)
        visible = [message async for message in store.iter_messages("totals")]
        log = [entry async for _, entry in store.iter_entries("totals")]
        self._say(f"After a rewind {count_messages(len(visible))} are visible; the log keeps all {len(log)} entries.")
        page = self._folder / "totals.html"
        page.write_text(await store.export("totals", "html"), encoding="utf-8")
        self._say(f"{page.name} ({readable_size(page.stat().st_size)}) shows it in a browser, without a server.")

    async def _verify_task(self) -> None:
        self._begin("A task: a repository, a problem, hidden tests")
        async with carrel.Session.for_sample("demo", "calc-1", cache=self._folder / "cache") as session:
            sample = session.sample
            assert sample is not None, "for_sample sets the sample of the session"
            self._say(f"“{sample.problem_statement.strip().splitlines()[0]}”")
            before = await session.verify()
            self._say(f"Unchanged: {before.outcome.replace('_', ' ')}; {before.failed} of {before.total} tests fail.")
            await session.execute_command("git apply -", stdin=sample.patch)
            after = await session.verify()
            if not after.is_success:
                raise TaskFailed(f"the sample's own solution was not accepted: {after.evidence}")
            self._say(f"With the sample's own solution, verified in a separate copy: {after.outcome}.", "green")
            self._say("`carrel task run` gives such tasks to an agent; `carrel serve` offers them over HTTP.")
