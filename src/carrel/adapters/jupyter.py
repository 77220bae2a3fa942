"""The Jupyter kernel `carrel`: the cells of a notebook run in a session.

`python -m carrel.adapters.jupyter install` adds it to Jupyter. The session is durable: its variables and files are
there again after a restart of the kernel."""

from __future__ import annotations

import argparse
import asyncio
import json
import keyword
import os
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.kernelspec import KernelSpecManager

from carrel.execution.executor import ExecutionResult, Output
from carrel.guest.worker.values import Repr
from carrel.home import resolve_carrel_home
from carrel.session.session import Session
from carrel.version import __version__

BASE, SESSION = "CARREL_KERNEL_BASE", "CARREL_KERNEL_SESSION"
"""Environment variables by which `main` tells the kernel its folder and session."""
_NAME_BEFORE = re.compile(r"[\w.]*\Z")
_NAME_AFTER = re.compile(r"\w*")
_LOOK_SECONDS = 2.0


class CarrelKernel(Kernel):
    """Runs cells in one session; code, commands and files are isolated as in any session of carrel."""

    implementation = "carrel"
    implementation_version = __version__
    banner = f"carrel {__version__}: Python in a sandboxed session"
    language_info = {  # noqa: RUF012 -- as in the base class
        "name": "python",
        "version": ".".join(map(str, sys.version_info[:3])),
        "mimetype": "text/x-python",
        "file_extension": ".py",
        "codemirror_mode": {"name": "ipython", "version": 3},
        "pygments_lexer": "ipython3",
    }

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._carrel = Session.from_base(
            os.environ.get(BASE) or resolve_carrel_home(),
            timeout=None,
            session_id=os.environ.get(SESSION) or uuid4().hex,
        )
        self._cells: list[tuple[int, int, str, str]] = []
        """For each cell that is kept: 0, its number, its code, what it gave."""
        self._transformer = TransformerManager()
        self._main_loop: asyncio.AbstractEventLoop | None = None

    # --- cells ------------------------------------------------------------------------------------------------------

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        allow_stdin: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        self._main_loop = asyncio.get_running_loop()
        result = ExecutionResult()
        async for piece in self._carrel.stream(code):
            if isinstance(piece, ExecutionResult):
                result = piece
            elif isinstance(piece, Output) and not silent:
                self._publish("stream", {"name": piece.stream, "text": piece.text})
        shown = "" if result.value is None else repr(result.value)
        if store_history:
            self._cells.append((0, self.execution_count, code, shown))
        if result.error is not None:
            return self._failed(result, silent)
        if not silent:
            self._show(result, shown)
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "payload": [],
            "user_expressions": {name: await self._expression(text) for name, text in (user_expressions or {}).items()},
        }

    def _failed(self, result: ExecutionResult, silent: bool) -> dict[str, Any]:
        lines = (result.error or "").splitlines()
        error = {"ename": result.error_type or "Error", "evalue": lines[-1] if lines else "", "traceback": lines}
        if not silent:
            self._publish("error", error)
        return {"status": "error", "execution_count": self.execution_count, **error}

    def _show(self, result: ExecutionResult, shown: str) -> None:
        """Publish what the cell displayed, and its value; a table comes as HTML too."""
        bundles, data = list(result.display), {"text/plain": shown}
        if bundles and isinstance(result.value, Repr) and "text/html" in bundles[-1]:
            data |= bundles.pop()
        for bundle in bundles:
            self._publish("display_data", {"data": bundle, "metadata": {}})
        if shown:
            self._publish("execute_result", {"execution_count": self.execution_count, "data": data, "metadata": {}})
        if result.state != "kept":
            self._publish("stream", {"name": "stderr", "text": f"[variables {result.state}: {result.state_reason}]\n"})

    async def _expression(self, text: str) -> dict[str, Any]:
        result = await self._carrel.run(text)
        if result.error is not None:
            return {"status": "error", "ename": result.error_type, "evalue": "", "traceback": result.error.splitlines()}
        return {"status": "ok", "data": {"text/plain": repr(result.value)}, "metadata": {}}

    def _publish(self, kind: str, content: dict[str, Any]) -> None:
        self.send_response(self.iopub_socket, kind, content)

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Stop the running cell."""
        await self._on_main_loop(self._carrel.interrupt)
        if self.session is not None:
            self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        await self._on_main_loop(self._carrel.close)
        return {"status": "ok", "restart": restart}

    async def _on_main_loop(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Do something with the session: messages of the control channel come in a thread with a loop of its own."""
        if self._main_loop is not None:  # otherwise no cell has run, and the session is not open
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._main_loop))

    # --- help while typing ------------------------------------------------------------------------------------------

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        status, indent = self._transformer.check_complete(code)
        return {"status": status} if status != "incomplete" else {"status": status, "indent": " " * (indent or 0)}

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        found = _NAME_BEFORE.search(code[:cursor_pos])
        text = found[0] if found else ""
        method = "attr_matches" if "." in text else "global_matches"
        names = await self._look(f"__import__('rlcompleter').Completer(globals()).{method}({text!r})") if text else []
        plain = {name.rstrip("(: ") for name in names if isinstance(name, str)}
        plain |= {word for word in keyword.kwlist if text and word.startswith(text)}
        return {
            "status": "ok",
            "matches": sorted(plain),
            "cursor_start": cursor_pos - len(text),
            "cursor_end": cursor_pos,
            "metadata": {},
        }

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Sequence[str] = ()
    ) -> dict[str, Any]:
        before, after = _NAME_BEFORE.search(code[:cursor_pos]), _NAME_AFTER.match(code[cursor_pos:])
        name = (before[0] if before else "") + (after[0] if after else "")
        parts = name.split(".")
        text = None
        if all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            renderer = "__import__('pydoc').render_doc({}, renderer=__import__('pydoc').plaintext)"
            text = await self._look(renderer.format(name))
        data = {"text/plain": text} if isinstance(text, str) else {}
        return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}

    async def _look(self, expression: str) -> Any:
        """Return the value of an expression in the session; None if it fails or takes long."""
        self._main_loop = asyncio.get_running_loop()
        result = await self._carrel.run(expression, timeout=_LOOK_SECONDS)
        return [] if result.error is not None and "Completer" in expression else result.value

    async def do_history(
        self,
        hist_access_type: str,
        output: bool,
        raw: bool,
        session: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        n: int | None = None,
        pattern: str | None = None,
        unique: bool = False,
    ) -> dict[str, Any]:
        """Return cells since this kernel began."""
        cells = self._cells
        if hist_access_type == "range":
            cells = [cell for cell in cells if (start or 0) <= cell[1] and (stop is None or cell[1] < stop)]
        elif hist_access_type == "search":
            cells = [cell for cell in cells if fnmatchcase(cell[2], pattern or "*")]
        if unique:
            cells = list({cell[2]: cell for cell in cells}.values())
        cells = cells[-n:] if n else cells
        history = [(number, line, (code, shown) if output else code) for number, line, code, shown in cells]
        return {"status": "ok", "history": history}


def main(arguments: Sequence[str] | None = None) -> None:
    """`install` adds the kernel to Jupyter; `run` is what Jupyter calls."""
    parser = argparse.ArgumentParser(
        prog="python -m carrel.adapters.jupyter", description="The Jupyter kernel of carrel."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (("install", "add the kernel to Jupyter"), ("run", "run a kernel; Jupyter calls this")):
        action = actions.add_parser(name, help=text)
        action.add_argument("--base", help="the folder of the sessions (default: $CARREL_HOME, else ~/.carrel)")
        action.add_argument("--session", help="the id of the session (default: one for each kernel)")
        if name == "run":
            action.add_argument("-f", dest="connection_file", required=True)
        else:
            action.add_argument("--name", default="carrel", help="the name of the kernel in Jupyter")
            action.add_argument("--prefix", help="install here instead of in the user's folder, such as sys.prefix")
    given = parser.parse_args(arguments)
    if given.action == "install":
        print(f"installed the kernel {given.name} in {install(given.name, given.base, given.session, given.prefix)}")
        return
    os.environ[BASE] = given.base or ""
    # Jupyter keeps the connection file at a restart, so the session is the same.
    os.environ[SESSION] = given.session or re.sub(r"[^\w.-]", "-", f"jupyter-{Path(given.connection_file).stem}")[:100]
    IPKernelApp.launch_instance(argv=["-f", given.connection_file], kernel_class=CarrelKernel)


def install(
    name: str = "carrel", base: str | None = None, session_id: str | None = None, prefix: str | None = None
) -> str:
    """Write the kernel's specification into Jupyter's folder, and return where."""
    command = [sys.executable, "-m", "carrel.adapters.jupyter", "run", "-f", "{connection_file}"]
    command += ["--base", str(Path(base).absolute())] if base else []
    command += ["--session", session_id] if session_id else []
    spec = {"argv": command, "display_name": f"Python ({name})", "language": "python", "interrupt_mode": "message"}
    with TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        return KernelSpecManager().install_kernel_spec(folder, name, user=prefix is None, prefix=prefix)


if __name__ == "__main__":
    main()
