"""What is told of an exception: the user's own lines with their source, and nothing of the worker's."""

from __future__ import annotations

import os
import traceback

_HERE = os.path.dirname(os.path.abspath(__file__))
_MOST_FRAMES = 40


def told(problem: BaseException) -> str:
    """The traceback as Python prints it, without the frames of this program."""
    try:
        trace = traceback.TracebackException(type(problem), problem, problem.__traceback__, compact=True)
        _strip(trace, set())
        return "".join(trace.format()).rstrip("\n")
    except Exception as worse:  # noqa: BLE001 - the exception's own __str__ may raise anything
        return "%s (and telling of it raised %s)" % (type(problem).__name__, type(worse).__name__)


def _strip(trace: traceback.TracebackException, seen: set[int]) -> None:
    if id(trace) in seen:
        return
    seen.add(id(trace))
    frames = [frame for frame in trace.stack if os.path.dirname(frame.filename) != _HERE]
    if len(frames) > _MOST_FRAMES:
        frames = frames[: _MOST_FRAMES // 2] + frames[-_MOST_FRAMES // 2 :]
    trace.stack = traceback.StackSummary.from_list(frames)
    for inner in (trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())):
        if inner is not None:
            _strip(inner, seen)
