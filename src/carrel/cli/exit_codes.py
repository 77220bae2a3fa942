"""Run a command and turn every exception into an exit code and one line on standard error."""

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

import typer

from carrel.errors import (
    ArtifactReadError,
    ArtifactWriteError,
    CarrelError,
    CompactRefused,
    DependencyError,
    ExecutionError,
    ImportRefused,
    MessageRefused,
    RequirementRefused,
    RuntimeDepsDisabledError,
    SessionBusy,
    SessionTooNew,
    StorageError,
    ToolCallError,
    WorkflowExecutionError,
)
from carrel.request_id import with_request_id
from carrel.text import single_line

DONE, FAILED, WRONG_USAGE, MACHINE_LACKS, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130
"""Done; the user's code or task failed; wrong usage; the machine lacks something; a bug in carrel; Ctrl-C."""

_ADVICE = {
    errno.EAGAIN: "no more threads or processes may be started here; end some, or raise the limit: ulimit -u",
    errno.EMFILE: "this process has too many files open; raise the limit: ulimit -n",
}

Parameters = ParamSpec("Parameters")


class WrongUsage(CarrelError, ValueError):
    """The command line cannot be carried out as it was typed; the message says what to type."""


class TaskFailed(CarrelError):
    """The command was carried out and did not succeed."""


def async_command(function: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Make a command of an async function."""

    @wraps(function)
    def command(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            asyncio.run(function(*args, **kwargs))
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()

    return command


def run_cli(load: Callable[[], typer.Typer]) -> int:
    """Load the command line and run it; return the exit code, whatever happens."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process: no other file may get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character shows its number.
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(_NoteFormatter())
    logging.getLogger("carrel").addHandler(handler)
    try:
        app = load()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while loading; from here on it raises KeyboardInterrupt
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = app(prog_name="carrel", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return DONE
    except SystemExit as left:
        # Typer exits like this when the reader of a pipe has gone.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        _discard_output()
        return DONE
    except (typer.TyperException, CarrelError, OSError) as problem:
        return _report(problem)
    except Exception as problem:
        if os.environ.get("CARREL_DEBUG"):
            raise
        if _is_interrupt(problem):
            return INTERRUPTED
        if isinstance(problem, RuntimeError) and str(problem) == "can't start new thread":
            return _report(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
        if isinstance(problem, UnicodeEncodeError) and (odd := next(filter(is_undecodable, sys.argv), None)):
            _print_error(f"{odd!r} is not text in UTF-8")
            return WRONG_USAGE
        _print_error(f"a bug in carrel: {type(problem).__name__}: {problem}; CARREL_DEBUG=1 shows where")
        return BUG


def _is_interrupt(problem: BaseException | None) -> bool:
    """Whether Ctrl-C caused it: one that comes while a class is loaded becomes a RuntimeError."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__cause__ or problem.__context__
    return problem is not None


def is_undecodable(word: str) -> bool:
    """Whether it was typed with bytes that are not text in this locale."""
    return any("\ud800" <= letter <= "\udfff" for letter in word)


class _NoteFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"note: {with_request_id(single_line(record.getMessage()))}"


def _report(problem: Exception) -> int:
    if isinstance(problem, typer.TyperException):
        message = problem.format_message()
        context = getattr(problem, "ctx", None)
        if context is not None:
            message = f"{message.rstrip('.')}; see `{context.command_path} --help`"
        _print_error(message)
        return problem.exit_code
    _print_error(_one_line(problem))
    return _code_of(problem)


def _one_line(problem: Exception) -> str:
    if isinstance(problem, OSError) and not isinstance(problem, CarrelError) and problem.strerror:
        text = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
        return f"{text} ({_ADVICE[problem.errno]})" if problem.errno in _ADVICE else text
    return str(problem) or type(problem).__name__


def _code_of(problem: Exception) -> int:
    match problem:
        case TaskFailed() | ImportRefused() | CompactRefused() | MessageRefused() | SessionBusy():
            return FAILED
        case RuntimeDepsDisabledError() | RequirementRefused():
            return WRONG_USAGE
        case ToolCallError() | WorkflowExecutionError() | DependencyError():
            return FAILED
        case StorageError() | ArtifactWriteError() | ArtifactReadError() if not isinstance(problem, ValueError):
            # A name that is a folder, or data of an unknown kind, is a mistake of the user; a failing store is not.
            is_store = isinstance(problem, StorageError) or isinstance(problem.__cause__, StorageError)
            return MACHINE_LACKS if is_store else WRONG_USAGE
        case SessionTooNew() | ExecutionError():
            return MACHINE_LACKS
        case CarrelError():
            return WRONG_USAGE
        case _:
            return MACHINE_LACKS


def _print_error(message: str) -> None:
    try:
        print(f"error: {single_line(message)}", file=sys.stderr)
    except OSError:
        return  # standard error is closed too; the exit code is left


def _discard_output() -> None:
    """After the reader (`| head`) has gone: Python flushes at exit, so what is left must go somewhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
