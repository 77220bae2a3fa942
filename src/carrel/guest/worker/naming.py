"""What a session's own processes are called in a list of processes: not as the programs that code starts."""

from __future__ import annotations

import ctypes

NAME = "carrel"
_SET_NAME = 15


def be_called(name: str = NAME) -> None:
    """This process and what is forked from it: `pkill python`, said to end a program of one's own, ends neither."""
    ctypes.CDLL(None).prctl(_SET_NAME, name.encode(), 0, 0, 0)
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as table:
            facts = table.read().rpartition(")")[2].split()
        # Where the words are that it was started with (fields 48 and 49 of proc(5)); 0 where that is not told.
        start, end = int(facts[45]), int(facts[46])
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end - len(name):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name.encode(), len(name))
