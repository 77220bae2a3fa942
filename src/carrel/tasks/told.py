"""Pure: one test as a report tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a report says of one test."""

    classname: str
    """The file, class, package or group that it is in; what each runner calls so."""
    name: str
    status: Status
    message: str = ""
    seconds: float = 0.0

    @property
    def whole_name(self) -> str:
        return f"{self.classname}::{self.name}" if self.classname else self.name
