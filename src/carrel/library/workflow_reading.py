"""Outlines of sources of any length: a long one is read in a process of its own, since Python reads it in one go."""

import time
from pathlib import Path
from typing import Self

from carrel.errors import WorkflowValidationError
from carrel.library.asked_process import AskedProcess
from carrel.library.workflow_source import LARGEST, QUICK, Outline, outline, syntax_error

SECONDS = 20.0
"""That one source may take; a machine at rest needs less than one."""
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from carrel.library.workflow_process import main; main()"
_CARREL = str(Path(__file__).parents[2])


class Outlines:
    """Reads one source after the other; blocks meanwhile, so have it in a thread where there are long ones."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process = AskedProcess("-c", _PROGRAM, _CARREL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()

    def read(self, name: str, source: str, description: str = "") -> Outline:
        """The same as `outline`; `WorkflowValidationError` also for what does not come to an end."""
        if not QUICK < len(source) <= LARGEST:
            return outline(name, source, description)
        try:
            answer = self._process.ask([name, source, description], time.monotonic() + self._seconds)
        except (OSError, EOFError) as problem:
            self._process.end()
            why = f"that took more than {self._seconds:g} s" if isinstance(problem, TimeoutError) else str(problem)
            raise WorkflowValidationError(f"the source of {name} cannot be read: {why}; make it shorter") from None
        if "syntax" in answer:
            raise syntax_error(*answer["syntax"])
        if "invalid" in answer:
            raise WorkflowValidationError(answer["invalid"])
        return Outline.from_data(answer["outline"])
