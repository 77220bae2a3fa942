"""How a command ends: with an exit code that says whose turn it is, and one line when it failed."""

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
from carrel.text import single_line

DONE, FAILED, WRONG_USAGE, MACHINE_LACKS, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130
"""What happened, the user's task failed, it was typed wrong, no room or no permission, our fault, Ctrl-C."""

_ADVICE = {
    errno.EAGAIN: "no more threads or processes may be started here; end some, or raise the limit: ulimit -u",
    errno.EMFILE: "this process has too many files open; raise the limit: ulimit -n",
}

Parameters = ParamSpec("Parameters")


class WrongUsage(CarrelError, ValueError):
    """What was typed cannot be done; the message says what can."""


class TaskFailed(CarrelError):
    """It was understood and tried, and did not come to what was asked for."""


def waits(function: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """An async function as a command."""

    @wraps(function)
    def command(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            asyncio.run(function(*args, **kwargs))
            sys.stdout.flush()
        except BrokenPipeError:
            _nobody_reads()

    return command


def run_to_its_end(loaded: Callable[[], typer.Typer]) -> int:
    """Load the command that was typed and run it; whatever happens, the code to exit with."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this: nothing else may take its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a letter shows its number; that is no reason to stop.
            stream.reconfigure(errors="backslashreplace")
    notes = logging.StreamHandler()
    notes.setFormatter(_Note())
    logging.getLogger("carrel").addHandler(notes)
    try:
        app = loaded()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # so far; from here on it is heeded
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = app(prog_name="carrel", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _nobody_reads()
        return DONE
    except SystemExit as left:
        # How typer ends where nobody reads; that is no failure of ours.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        _nobody_reads()
        return DONE
    except (typer.TyperException, CarrelError, OSError) as problem:
        return _say(problem)
    except Exception as problem:
        if os.environ.get("CARREL_DEBUG"):
            raise
        if _came_of_ctrl_c(problem):
            return INTERRUPTED
        if isinstance(problem, RuntimeError) and str(problem) == "can't start new thread":
            return _say(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
        if isinstance(problem, UnicodeEncodeError) and (odd := next(filter(is_no_text, sys.argv), None)):
            _print_error(f"{odd!r} is no text in UTF-8")
            return WRONG_USAGE
        _print_error(f"a bug in carrel: {type(problem).__name__}: {problem}; CARREL_DEBUG=1 shows where")
        return BUG


def _came_of_ctrl_c(problem: BaseException | None) -> bool:
    """What was interrupted may say so in its own words: loading a class makes a RuntimeError of it."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__cause__ or problem.__context__
    return problem is not None


def is_no_text(word: str) -> bool:
    """Whether it was typed with bytes that are no letters here."""
    return any("\ud800" <= letter <= "\udfff" for letter in word)


class _Note(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"note: {single_line(record.getMessage())}"


def _say(problem: Exception) -> int:
    if isinstance(problem, typer.TyperException):
        message = problem.format_message()
        context = getattr(problem, "ctx", None)
        if context is not None:
            message = f"{message.rstrip('.')}; `{context.command_path} --help` shows what can be typed"
        _print_error(message)
        return problem.exit_code
    _print_error(_one_line(problem))
    return _code_of(problem)


def _one_line(problem: Exception) -> str:
    if isinstance(problem, OSError) and not isinstance(problem, CarrelError) and problem.strerror:
        said = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
        return f"{said} ({_ADVICE[problem.errno]})" if problem.errno in _ADVICE else said
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
            # A name that is a folder, or data that nobody can keep, is the user's; what the store refused is not.
            ours = isinstance(problem, StorageError) or isinstance(problem.__cause__, StorageError)
            return MACHINE_LACKS if ours else WRONG_USAGE
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
        # Nobody listens there either; the exit code still tells.
        return


def _nobody_reads() -> None:
    """The reader (`| head`) has seen enough. Python flushes at exit, so what is left must go somewhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
