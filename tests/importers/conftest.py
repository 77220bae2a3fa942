"""The folder of sample session files, and a reader for lines made by a test."""

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from carrel.conversation.importers import ImportedSession, read_session_file

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture
def samples() -> Path:
    return SAMPLES


@pytest.fixture
def imported_from(tmp_path: Path) -> Callable[..., list[ImportedSession]]:
    """Return a function that writes lines (dicts, text or bytes) to a file and reads it as a session."""

    def read(*lines: object, name: str = "session.jsonl", **options: bool) -> list[ImportedSession]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
        return list(read_session_file(path, **options))

    return read


def _line(line: object) -> bytes:
    return line.encode() if isinstance(line, str) else line if isinstance(line, bytes) else orjson.dumps(line)
