"""Sees from inside Python which file installs a tracer or a profiler, and which code modules are made of.

Standard library only, and any Python from 3.8 on: an audit hook, which nothing can take away again.
"""

import os
import sys
from typing import Any

from carrel_recorder_compare import Executed

_EVENTS = frozenset(("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback"))
_DOCTEST = os.path.join(os.path.dirname(os.__file__), "doctest.py")
_frame, _getpid = sys._getframe, os.getpid


def watch(executed: Executed, workdir: str, theirs: Any, found: Any) -> None:
    """`found` gets the files of the work that have code on the stack when a tracer or a profiler is installed."""
    add = getattr(sys, "addaudithook", None)
    if add is None:
        return
    owner, note = _getpid(), executed.note

    def hook(event: str, values: Any) -> None:
        if event == "exec":
            note(values[0])
        elif event in _EVENTS and _getpid() == owner:
            frame = _frame(1)  # type: Any
            if frame.f_code.co_filename == _DOCTEST:
                return  # It puts back what was there before.
            while frame is not None:
                name = frame.f_code.co_filename
                if name.startswith(workdir) and name[len(workdir) :] in theirs:
                    found.add(name[len(workdir) :])
                frame = frame.f_back

    add(hook)
