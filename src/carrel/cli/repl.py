"""`carrel repl`: an interactive session. Ctrl-C stops the running code, Ctrl-D ends the session."""

import ast
import asyncio
import builtins
import codeop
import concurrent.futures
import contextlib
import keyword
import re
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import typer

import carrel
from carrel.cli.options import RUN, Base, Network, SessionName, Timeout, command, resolve_base
from carrel.cli.output import print_text
from carrel.cli.run import print_result, run_printing, write_stream
from carrel.cli.session_states import note_resumed, settings_of_workspace

T = TypeVar("T")
_HISTORY = 2000
_WORD = re.compile(r"[\w.]*$")
GREETING = "Python in a session. !COMMAND runs a shell command; Tab completes; Ctrl-C stops code, Ctrl-D leaves."

app = typer.Typer()


@command(app, "repl", panel=RUN, example="carrel repl")
def repl(base: Base = None, timeout: Timeout = 0.0, network: Network = True, session_name: SessionName = None) -> None:
    """Type Python in an interactive session."""
    folder = resolve_base(base)
    with contextlib.closing(LoopThread()) as loop:
        workspace, mode = settings_of_workspace(base, session_name, None, "overlay")
        session = carrel.Session.from_base(
            folder,
            timeout=timeout or None,
            network=network,
            on_error="skip",
            session_id=session_name,
            workspace=workspace,
            workspace_mode=mode,
        )
        try:
            loop.run(session.start())
            note_resumed(session)
            Repl(session, loop, folder / "repl-history").serve()
        finally:
            loop.run(session.close())


class LoopThread:
    """An event loop in a thread, in which the session works while the main thread waits for input."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="carrel-session", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Repl:
    """Reads inputs, runs them in the session and prints the results."""

    def __init__(self, session: "carrel.Session", loop: LoopThread, history: Path) -> None:
        self._session = session
        self._loop = loop
        self._history = history
        self._compile = codeop.CommandCompiler()
        self._compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._matches: list[str] = []
        self._exited = False

    def serve(self) -> None:
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            print_text(GREETING, "dim")
        with self._line_editing() if at_terminal else contextlib.nullcontext():
            while True:
                try:
                    text = self._read(at_terminal)
                except KeyboardInterrupt:
                    write_stream(sys.stdout, "\n")
                    continue
                if text is None:
                    if at_terminal:
                        write_stream(sys.stdout, "\n")
                    return
                if text.strip():
                    self._execute(text)
                if self._exited:
                    return

    def _read(self, at_terminal: bool) -> str | None:
        """Return one complete input, which may have several lines; None at the end."""
        lines: list[str] = []
        while True:
            try:
                line = input((">>> " if not lines else "... ") if at_terminal else "")
            except EOFError:
                return "\n".join(lines) if lines else None
            lines.append(line)
            if line.startswith("!") and len(lines) == 1:
                return line
            try:
                if self._compile("\n".join(lines), "<input>", "single") is not None:
                    return "\n".join(lines)
            except (SyntaxError, ValueError, OverflowError):
                # Running it gives the error message.
                return "\n".join(lines)

    def _execute(self, text: str) -> None:
        task = self._command(text[1:]) if text.startswith("!") else self._code(text)
        running = self._loop.submit(task)
        while True:
            try:
                running.result()
                return
            except KeyboardInterrupt:
                self._loop.submit(self._stop(running))
            except concurrent.futures.CancelledError:
                write_stream(sys.stderr, "stopped\n")
                return
            except (carrel.CarrelError, OSError) as problem:
                write_stream(sys.stderr, f"{type(problem).__name__}: {problem}\n")
                return

    async def _stop(self, running: "concurrent.futures.Future[None]") -> None:
        if not await self._session.interrupt():
            running.cancel()

    async def _code(self, text: str) -> None:
        result = await run_printing(self._session, text)
        print_result(result)
        self._exited = result.error_type == "SystemExit"

    async def _command(self, command: str) -> None:
        result = await self._session.execute_command(command, timeout=None)
        write_stream(sys.stdout, result.stdout)
        write_stream(sys.stderr, result.stderr)
        if result.exit_code != 0:
            write_stream(sys.stderr, f"(exit code {result.exit_code})\n")

    # --- completion and history -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _line_editing(self) -> Iterator[None]:
        import readline  # noqa: PLC0415 -- changes how input() reads, which is wanted at a terminal only

        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_history_length(_HISTORY)
        readline.set_completer(self._complete)
        readline.set_completer_delims(" \t\n`~!@#$%^&*()-=+[{]}\\|;:'\",<>/?")
        readline.parse_and_bind("tab: complete")
        # A pasted text is one input; otherwise a blank line inside a function would end it.
        readline.parse_and_bind("set enable-bracketed-paste on")
        try:
            yield
        finally:
            readline.set_completer(None)
            try:
                self._history.touch(mode=0o600)
                readline.write_history_file(self._history)
            except OSError as problem:
                write_stream(sys.stderr, f"the history could not be saved: {problem}\n")

    def _complete(self, text: str, number: int) -> str | None:
        if number == 0:
            import readline  # noqa: PLC0415 -- see `_line_editing`

            if not readline.get_line_buffer()[: readline.get_endidx()].strip():
                return "    "  # at the beginning of a line, Tab indents
            try:
                self._matches = self._loop.run(self._completions(text))
            except (carrel.CarrelError, OSError):
                self._matches = []
        return self._matches[number] if number < len(self._matches) else None

    async def _completions(self, text: str) -> list[str]:
        """Return the completions of a word: names in the four namespaces, else variables."""
        known = []
        for tool in await self._session.list_tools():
            known += [
                f"tools.{tool['name']}",
                *(f"tools.{tool['name']}.{recipe['name']}" for recipe in tool["recipes"]),
            ]
        known += [f"workflows.{workflow['name']}" for workflow in await self._session.list_workflows()]
        known += [f"artifacts.{verb}" for verb in ("save", "load", "list", "delete", "exists", "get")]
        known += [f"deps.{verb}" for verb in ("add", "list", "remove", "sync")]
        if "." not in text:
            variables = await self._session.executor.run("[*globals()]", 1.0)
            known = [name for name in variables.value or () if not name.startswith("_")]
            known += ["tools", "workflows", "artifacts", "deps", *dir(builtins), *keyword.kwlist]
        # Other names cannot be typed this way, and may contain anything.
        matching = [name for name in known if name.startswith(text) and name.replace(".", "").isidentifier()]
        depth = text.count(".")
        found = sorted({".".join(name.split(".")[: depth + 1]) for name in matching})
        return [f"{name}." if name in ("tools", "workflows", "artifacts", "deps") else name for name in found]
