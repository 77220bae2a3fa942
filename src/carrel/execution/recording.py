"""What workers report of the variables after a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from carrel.execution.channels import Record
from carrel.guest.channel import ChannelError
from carrel.guest.worker.recording import MAX_BYTES, MAX_VARIABLES

_MAX_RECORD = 3 * MAX_BYTES
"""Bytes of a report as JSON, which escapes characters."""


@dataclass(slots=True, frozen=True)
class RecordedVariable:
    """A variable as it was after a run."""

    type: str
    size: int
    preview: str
    """Its beginning, as text; empty where there was no time to look at it."""
    digest: str
    """Equal for equal values. After `~`, it covers only a part of the value; empty where there is none."""


@dataclass(slots=True, frozen=True)
class VariableReport:
    """The variables of a session after a run."""

    variables: Mapping[str, RecordedVariable]
    left_out: int
    """How many more there are."""
    files: str
    """A digest of the workspace's files by their sizes and times; empty where there are too many."""


OnVariables = Callable[[VariableReport], None]
"""Called with the variables after a run; not called for a run that is followed by another at once."""


def read_report(record: Record, length: int) -> VariableReport:
    """Return the report in a record of a worker; ChannelError for what no worker sends."""
    listed, left_out, files = record.get("variables"), record.get("left_out"), record.get("files")
    if length > _MAX_RECORD or not isinstance(listed, list) or len(listed) > MAX_VARIABLES:
        raise ChannelError("the worker sent a report of variables that is too long")
    if type(left_out) is not int or left_out < 0 or not isinstance(files, str):
        raise ChannelError("the worker sent an invalid report of variables")
    found = {}
    for entry in listed:
        match entry:
            case [str(name), str(kind), int(size), str(preview), str(digest)]:
                found[name] = RecordedVariable(kind, size, preview, digest)
            case _:
                raise ChannelError("the worker sent an invalid report of variables")
    return VariableReport(found, left_out, files)
