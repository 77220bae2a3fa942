"""A program of its own: reads outlines of long sources, which would keep a whole process from doing anything else."""

import json
import sys

from carrel.errors import WorkflowSyntaxError, WorkflowValidationError
from carrel.library.workflow_source import outline


def main() -> None:
    """A line `[name, source, description]` in, a line with the outline or the error out."""
    for line in sys.stdin:
        answer: dict[str, object]
        try:
            answer = {"outline": outline(*json.loads(line)).as_data()}
        except WorkflowSyntaxError as problem:
            answer = {"syntax": [str(problem), problem.lineno, problem.offset, problem.text]}
        except WorkflowValidationError as problem:
            answer = {"invalid": str(problem)}
        print(json.dumps(answer), flush=True)
