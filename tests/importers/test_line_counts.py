"""Every line of any file is counted exactly once, and damaged files are read as far as possible."""

import copy
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.conversation.importers import ImportedSession, read_session_file
from carrel.conversation.log_entries import decode, encode
from carrel.conversation.replay import visible_after
from carrel.errors import ImportRefused

SAMPLES = Path(__file__).parent / "samples"
FILES = sorted(SAMPLES.rglob("*.jsonl"))
LINES = {file: file.read_bytes().splitlines() for file in FILES}

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["", "a1", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "id", "text", "content", "role"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def check(imported: ImportedSession) -> None:
    report = imported.report
    assert report.accounted == report.lines
    assert report.imported == len(imported.messages) - (imported.forked_at or 0)
    assert set(report.reasons) >= set(report.ignored)
    assert all(report.reasons[what] for what in report.ignored)
    for entry in imported.messages:
        assert decode(encode(entry)) is not None
    visible_after(list(enumerate(imported.messages, 1)))
    for entry in imported.messages:
        meta = entry.get("meta") or {}
        if imported.kind != "carrel":
            assert 0 < meta.get("keep_from_seq", 1) <= len(imported.messages)
            assert 0 <= meta.get("to_seq", 0) <= len(imported.messages)


def read(path: Path) -> list[ImportedSession]:
    found = list(read_session_file(path, all_branches=True))
    for imported in found:
        check(imported)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name + "/" + file.name[:40])
def test_every_line_of_every_sample_is_counted_once(file: Path) -> None:
    first = read(file)[0]
    assert first.report.lines == len(LINES[file])


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, each in inner for deeper in paths_in(each, (*path, key)))]


@st.composite
def damaged_lines(draw: st.DrawFn) -> list[bytes]:
    """Draw the lines of a sample, some dropped, doubled, moved, cut, or with an odd value inside."""
    lines = list(LINES[draw(st.sampled_from(FILES))])
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["drop", "double", "move", "cut", "odd", "odd", "odd", "junk"])):
            case "drop" if len(lines) > 1:
                del lines[at]
            case "double":
                lines.insert(draw(st.integers(0, len(lines))), lines[at])
            case "move":
                lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
            case "junk":
                lines[at] = draw(st.binary(max_size=20)).replace(b"\n", b"")
            case "odd":
                lines[at] = odd(lines[at], draw)
    return lines


def odd(line: bytes, draw: st.DrawFn) -> bytes:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line
    path = draw(st.sampled_from(paths_in(record)))
    value = draw(ODD)
    holder = {"record": copy.deepcopy(record)}
    at: Any = holder
    for key in ("record", *path)[:-1]:
        at = at[key]
    at[("record", *path)[-1]] = value
    return json.dumps(holder["record"]).encode()


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(lines=damaged_lines())
def test_a_damaged_file_is_read_as_far_as_possible(lines: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "damaged.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    try:
        first = read(file)[0]
    except ImportRefused:
        return
    assert first.report.lines == len(file.read_bytes().split(b"\n")) - 1
