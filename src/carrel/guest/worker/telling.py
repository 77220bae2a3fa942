"""What is told of an exception: the user's own lines with their source, and nothing of the worker's or a library's."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
from traceback import StackSummary, TracebackException

_HERE = os.path.dirname(os.path.abspath(__file__))
_LONGEST = 40_000
_FOLDERS = (_HERE, *(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")))
_CELL = re.compile(r"(<cell \d+) of \d+>")
"""A cell's name where several sessions share a process; each calls it by its own number alone."""
_AWAITED = re.compile(r"can't be (used in 'await' expression|awaited)|a coroutine or an awaitable is required")
_ON_THE_HOST = re.compile(r"\b(tools|workflows|skills|artifacts|deps)\.")
_PLAIN = "A plain call waits by itself and returns its value: leave out `await`, or write `await NAME.call_async(…)`."
_NO_PYTHON = (
    ("```", "Code is plain Python: leave out the ``` around it."),
    ("!", "There is no `!` here: deps.add('NAME') installs a package, subprocess.run(…) runs a command."),
    ("%", "There are no % commands here, only Python: deps.add('NAME') installs a package."),
    ("?", "There is no `?` here: help(NAME) tells of a name."),
)
"""What stands in chats and notebooks, at the beginning of a line, and is no Python."""
_NO_DEBUGGER = "A debugger has nobody to ask here: print what you want to see."
_LIBRARIES = ["<frozen ", *(path + os.sep for path in (*_FOLDERS, *map(os.path.realpath, _FOLDERS)))]
_COMPILED = (".pyx", ".pxi", ".pxd")
"""Sources of packages that were compiled from them: their frames name files that are not there."""


def leave_out(folder: str) -> None:
    """Tell nothing of the frames of files in this folder of packages."""
    for path in (folder, os.path.realpath(folder)):
        if path + os.sep not in _LIBRARIES:
            _LIBRARIES.append(path + os.sep)


def told(problem: BaseException, besides: tuple[str, ...] = ()) -> str:
    """The traceback as Python prints it, without the frames of this program and of installed packages, and without
    those of files that begin so."""
    try:
        trace = TracebackException(type(problem), problem, problem.__traceback__, limit=-2000)
        _strip(trace, set(), (*_LIBRARIES, *besides))
        hint = _hint(problem, trace)
        text = "".join(trace.format()).rstrip("\n") + (f"\n{hint}" if hint else "")
    except Exception as worse:  # noqa: BLE001 - the exception's own __str__ may raise anything
        text = f"{type(problem).__name__} (and telling of it raised {type(worse).__name__})"
    if len(text) > _LONGEST:
        cut = len(text) - _LONGEST
        text = f"{text[: _LONGEST // 2]}\n… {cut} characters left out …\n{text[-_LONGEST // 2 :]}"
    return text


def _hint(problem: BaseException, trace: TracebackException) -> str:
    """What to do instead, where the code was written for another place."""
    if isinstance(problem, SyntaxError):
        line = (problem.text or "").strip()
        return next((instead for mark, instead in _NO_PYTHON if line.startswith(mark)), "")
    if kind(problem) == "BdbQuit":
        return _NO_DEBUGGER
    if type(problem) is TypeError and _AWAITED.search(str(problem)) and trace.stack:
        # Whoever comes from a place where every call is awaited does so here too.
        return _PLAIN if _ON_THE_HOST.search(trace.stack[-1].line or "") else ""
    return ""


def worker_traceback(problem: BaseException) -> str:
    """The traceback of an exception in the worker itself; its files are named without their folder on the host."""
    trace = TracebackException(type(problem), problem, problem.__traceback__)
    for frame in trace.stack:
        if frame.filename.startswith(_HERE):
            frame.filename = os.path.relpath(frame.filename, os.path.dirname(_HERE))
    return "".join(trace.format(chain=False)).rstrip("\n")


def told_of_thread(ended: threading.ExceptHookArgs) -> None:
    """What Python writes when a thread ends by an exception, in the same form."""
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit) and sys.stderr is not None:
        name = ended.thread.name if ended.thread is not None else "unknown"
        sys.stderr.write(f"Exception in thread {name}:\n{told(ended.exc_value)}\n")


def is_plain_interrupt(problem: BaseException | None) -> bool:
    """Whether telling of this KeyboardInterrupt runs no code but Python's own, and so comes to an end."""
    if type(problem) is not KeyboardInterrupt:
        return False
    seen: set[int] = set()
    while problem is not None and id(problem) not in seen:
        if type(problem).__module__ not in ("builtins", "asyncio.exceptions"):
            return False
        seen.add(id(problem))
        problem = problem.__cause__ or problem.__context__
    return True


def told_late(problem: BaseException) -> str:
    """Of what was raised while an outcome was told: where it was an interrupt after another, the first is told."""
    first = problem
    while is_plain_interrupt(first) and isinstance(first.__context__, KeyboardInterrupt):
        first = first.__context__
    return told(first) if first is not problem else f"{kind(problem)}: while the result was made"


def kind(problem: BaseException) -> str:
    """The name of its class."""
    name = type(problem).__name__
    return name if isinstance(name, str) else "Exception"


def _strip(trace: TracebackException, seen: set[int], hidden: tuple[str, ...]) -> None:
    if id(trace) in seen:
        return
    seen.add(id(trace))
    mine = [frame for frame in trace.stack if not frame.filename.startswith(hidden) and not _compiled(frame.filename)]
    for frame in mine:
        frame.filename = _CELL.sub(r"\1>", frame.filename)
    if isinstance(getattr(trace, "filename", None), str):
        trace.filename = _CELL.sub(r"\1>", trace.filename)  # of a SyntaxError
    trace.stack = StackSummary.from_list(mine)
    for inner in (trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())):
        if inner is not None:
            _strip(inner, seen, hidden)


def _compiled(filename: str) -> bool:
    return filename.endswith(_COMPILED) and not os.path.isabs(filename)
