"""Recognizing session files and folders, and refusing other files with a clear message."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.conversation.importers import ImportedSession, detect, read_session_file
from carrel.conversation.importers.base import MAX_LINE, read_lines
from carrel.errors import CarrelError, ImportRefused

Reader = Callable[..., list[ImportedSession]]
HELLO = b'{"type":"user","uuid":"u","message":{"role":"user","content":"hello"}}\n'


@pytest.mark.parametrize("agent", ["claude-code", "codex", "pi", "carrel"])
def test_each_kind_is_recognized_by_content_not_by_name(samples: Path, tmp_path: Path, agent: str) -> None:
    for number, file in enumerate(sorted((samples / agent).rglob("*.jsonl"))):
        copy = tmp_path / f"{number}.txt"
        copy.write_bytes(file.read_bytes())
        assert detect(copy) == agent


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n\n",
        os.urandom(5000),
        b"\x89PNG\r\n\x1a\n" + bytes(1000),
        b"just some words\nand more\n",
        b'{"a": 1}\n[1, 2]\n3\n"four"\nnull\n',
        '{"type":"user"}'.encode("utf-16"),
        b'{"display":"/help","timestamp":1,"project":"/x"}\n',
        b"[" * 100_000,
    ],
    ids=["empty", "blank lines", "noise", "a picture", "words", "other JSON", "UTF-16", "a prompt history", "nesting"],
)
def test_a_file_that_is_not_a_session_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "what.jsonl"
    file.write_bytes(content)
    assert detect(file) is None
    with pytest.raises(ImportRefused, match=r"what\.jsonl"):
        list(read_session_file(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert detect(tmp_path / "nowhere") is None
    with pytest.raises(ImportRefused, match="No such file"):
        list(read_session_file(tmp_path / "nowhere"))


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    assert detect(loop) is None
    with pytest.raises(ImportRefused, match=r"loop\.jsonl"):
        list(read_session_file(loop))


def test_an_impossible_file_name_is_refused() -> None:
    assert detect("a\x00b") is None
    with pytest.raises(ImportRefused):
        list(read_session_file("a\x00b"))


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ImportRefused, match="not a regular file"):
        list(read_session_file(tmp_path / "pipe.jsonl"))


def test_a_compressed_rollout_is_refused_with_the_command_to_unpack_it(tmp_path: Path) -> None:
    (tmp_path / "rollout-x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ImportRefused, match="zstd -d"):
        list(read_session_file(tmp_path / "rollout-x.jsonl.zst"))


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + HELLO.replace(b"\n", b"\r\n"))
    [session] = read_session_file(file)
    assert session.title == "hello"


def test_invalid_bytes_make_only_their_line_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(HELLO + b'{"type":"user","message":{"content":"\xff\xfe"}}\n' + HELLO.replace(b'"u"', b'"v"'))
    [session] = read_session_file(file)
    assert session.report.unreadable == [2]
    assert len(session.messages) == 2


def test_a_complete_last_line_without_newline_is_read(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(HELLO.rstrip())
    [session] = read_session_file(file)
    assert session.title == "hello"
    assert session.report.problems == []


def test_a_line_of_a_gigabyte_is_skipped_without_being_held_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    with file.open("wb") as out:
        out.write(HELLO)
        out.truncate(len(HELLO) + 1024**3)
        out.seek(0, os.SEEK_END)
        out.write(b"\n" + HELLO.replace(b'"u"', b'"v"'))
    tracemalloc.start()
    [session] = read_session_file(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert session.report.unreadable == [2]
    assert "longer than" in session.report.problems[0]
    assert len(session.messages) == 2
    assert peak < 3 * MAX_LINE


def test_a_large_file_is_never_in_memory_at_once(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    snapshot = b'{"type":"file-history-snapshot","snapshot":"' + b"x" * 100_000 + b'"}\n'
    with file.open("wb") as out:
        out.write(HELLO)
        out.writelines(snapshot for _ in range(500))
    tracemalloc.start()
    [session] = read_session_file(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert session.report.ignored["file-history-snapshot"] == 500
    assert peak < file.stat().st_size / 5


def test_only_lines_up_to_the_limit_are_read(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(b"1234567\n12345678\n123456789\n1234567890\nx")
    assert [line for _, line in read_lines(file, max_line=8)] == [b"1234567\n", b"12345678\n", None, None, b"x"]


def test_a_folder_yields_every_session_below_it(samples: Path) -> None:
    sessions = list(read_session_file(samples))
    assert [session.kind for session in sessions].count("claude-code") == 4
    assert [session.kind for session in sessions].count("codex") == 3
    assert [session.kind for session in sessions].count("pi") == 2
    assert [session.kind for session in sessions].count("carrel") == 3
    ids = [session.source_id for session in sessions]
    assert len(ids) == len(set(ids))
    for session in sessions:
        if session.kind == "claude-code" and session.parent:
            assert ids.index(session.parent) < ids.index(session.source_id)


def test_bad_files_in_a_folder_are_reported_and_skipped(tmp_path: Path) -> None:
    (tmp_path / "a-noise.jsonl").write_bytes(b"\x00\x01\x02")
    (tmp_path / "b-loop.jsonl").symlink_to(tmp_path / "b-loop.jsonl")
    (tmp_path / "c-packed.jsonl.zst").write_bytes(b"(\xb5/\xfd")
    (tmp_path / "d-good.jsonl").write_bytes(HELLO)
    (tmp_path / "e-newer").mkdir()
    (tmp_path / "e-newer" / "messages.jsonl").write_text('{"role":"user","content":[]}\n')
    (tmp_path / "e-newer" / "meta.json").write_text('{"message_format_version": 99}')
    (tmp_path / "notes.txt").write_text("no session file by its name")
    (tmp_path / "up").symlink_to(tmp_path)
    found = {Path(session.report.path).name: session for session in read_session_file(tmp_path)}
    assert found["d-good.jsonl"].report.refused is None
    assert len(found["d-good.jsonl"].messages) == 1
    refused = {name for name, session in found.items() if session.report.refused}
    assert refused == {"a-noise.jsonl", "b-loop.jsonl", "c-packed.jsonl.zst", "messages.jsonl"}
    assert all(not found[name].messages for name in refused)


def test_an_agent_file_without_its_session_is_read_on_its_own(tmp_path: Path) -> None:
    record = HELLO.replace(b'"uuid"', b'"isSidechain":true,"agentId":"7f","sessionId":"gone","uuid"')
    (tmp_path / "agent-7f.jsonl").write_bytes(record)
    [session] = read_session_file(tmp_path)
    assert (session.source_id, session.parent) == ("7f", "gone")


def test_a_folder_without_sessions_is_refused(tmp_path: Path) -> None:
    assert detect(tmp_path) is None
    with pytest.raises(ImportRefused, match=r"no \.jsonl file"):
        list(read_session_file(tmp_path))


def test_a_refusal_is_a_carrel_error_and_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(CarrelError):
        list(read_session_file(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="nowhere"):
        list(read_session_file(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "text",
    [
        '{"working_dir":"/c","description":"x"}\n{"id":null,"role":"user","created":1,"content":[]}\n',
        '[\n {"role":"user","content":"hi"},\n {"role":"assistant","content":"yo"}\n]\n',
        '[{"role":"user","content":"hi"}]',
        '{"sessionId":"a","messages":[{"type":"user","content":"hi"}]}',
        '{"sessionId":"a","kind":"main"}\n{"id":"1","type":"user","content":[{"text":"hi"}]}\n',
        "# aider chat started at 2026-01-01\n\n#### hi\n",
        '{"sessionId":"x","history":[{"message":{"role":"user","content":"hi"}}]}',
    ],
)
def test_sessions_of_unsupported_programs_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "session.jsonl"
    file.write_text(text)
    with pytest.raises(ImportRefused, match="is not a session of Claude Code, Codex, pi, carrel"):
        list(read_session_file(file))
