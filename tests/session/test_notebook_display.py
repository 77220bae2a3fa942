"""How sessions, results and conversations are shown in notebooks: whatever the code returned, the HTML is harmless."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from carrel import Conversation, ExecutionResult, Session, SessionInfo

HOSTILE = "</pre></td><script>alert(1)</script><img src=x onerror=alert(1)>\x1b]0;title\x07\u202e"


class Tags(HTMLParser):
    """Collects tags, attributes and text; HTML that is not well-formed fails."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes += attributes
        if tag != "img":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(html: str) -> Tags:
    tags = Tags(html)
    assert tags.found <= {"table", "caption", "tr", "th", "td", "pre", "img"}
    assert not {"\x1b", "\x07", "\u202e"} & set(tags.text)
    assert {name for name, _ in tags.attributes} <= {"alt", "src"}
    return tags


def test_a_result() -> None:
    image = {"image/png": "aGVsbG8=", "text/html": HOSTILE, "text/plain": "figure"}
    tags = assert_harmless(ExecutionResult(value=45, stdout="printed\n", display=[image])._repr_html_())
    assert tags.text == "Resultvalue45stdoutprinted\n"
    assert ("src", "data:image/png;base64,aGVsbG8=") in tags.attributes


@pytest.mark.parametrize("field", ["value", "stdout", "stderr", "error", "error_type", "state_reason"])
def test_a_hostile_result(field: str) -> None:
    fields: dict[str, Any] = {"error": "failed", field: HOSTILE}
    result = ExecutionResult(**fields)
    assert "<script>" in assert_harmless(result._repr_html_()).text


def test_a_hostile_image() -> None:
    tags = assert_harmless(ExecutionResult(display=[{"image/png": '"><script>alert(1)</script>'}])._repr_html_())
    assert "img" not in tags.found


def test_a_long_result_is_cut() -> None:
    html = ExecutionResult(stdout="x" * 1_000_000)._repr_html_()
    assert len(html) < 5000
    assert "… 998,000 more characters" in html


def test_a_conversation() -> None:
    conversation = Conversation(info=SessionInfo(title=HOSTILE, project_dir="", working_dir=""))
    for number in range(30):
        conversation.create_user_message(f"message {number}{HOSTILE}")
    tags = assert_harmless(conversation._repr_html_())
    assert "30 messages" in tags.text
    assert "message 29" in tags.text
    assert "message 9" not in tags.text


def test_a_session(tmp_path: Path) -> None:
    session = Session.inprocess(tmp_path / "<script>")
    session.conversation = Conversation(info=SessionInfo(title=HOSTILE, project_dir="", working_dir=""))
    tags = assert_harmless(session._repr_html_())
    assert f"Session {session.id}" in tags.text
    assert "\n" not in repr(session)
