"""At a terminal: colours, columns that fit, and control characters made harmless."""

import json
import re
from typing import Any

import pytest

from carrel import (
    SessionStore,
    assistant_message,
    build_message,
    text_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.text import neutralize_control_chars

ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\u202e[bold red]x[/] :smile:\r\n\x00"
ALLOWED = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def hostile(keep: Any) -> str:
    async def write(store: SessionStore) -> None:
        await store.create_session(ATTACK, session_id="hostile", model=ATTACK, cwd="/tmp/" + ATTACK.replace("\x00", ""))
        call = tool_use_block(tool_id="t", name=ATTACK, input={ATTACK: ATTACK})
        result = tool_result_block(tool_use_id="t", model_text=ATTACK, display_text=ATTACK + ATTACK)
        await store.append_many(
            "hostile",
            [
                user_text_message(ATTACK + "needle"),
                assistant_message([text_block(ATTACK), call, {"type": ATTACK}]),
                build_message("user", [result, text_block(ATTACK)]),
                build_message(ATTACK, [text_block("by an unknown role")]),
            ],
        )
        await store.set_tags("hostile", [ATTACK])
        await store.label("hostile", ATTACK)

    keep(write)
    return "hostile"


COMMANDS = [
    "list",
    "show hostile",
    "show hostile --full",
    "show hostile --entries",
    "tail hostile --no-follow",
    "search needle",
    "usage hostile",
    "fork hostile",
    "tag hostile",
    "archive hostile",
    "export hostile --format markdown",
    "prune --older-than 1m",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_nothing_in_a_session_acts_on_the_terminal(at_terminal: Any, carrel: Any, hostile: str, words: str) -> None:
    terminal = at_terminal("sessions", *words.split())
    assert terminal.end() == 0
    for shown in (ALLOWED.sub("", terminal.shown), carrel("sessions", *words.split()).stdout):
        acting = [letter for letter in shown if (ord(letter) < 32 and letter not in "\n") or "\x7f" <= letter <= "\x9f"]
        assert acting == []
        assert "\u202e" not in shown
        assert "😄" not in shown


def test_an_error_about_hostile_text_is_harmless(carrel: Any) -> None:
    error = carrel("sessions", "show", "\x1b[31mred\x07", code=2).stderr
    assert "\x1b" not in error
    assert "\x07" not in error


def test_json_is_complete_and_harmless(carrel: Any, hostile: str) -> None:
    raw = carrel("sessions", "show", hostile, "--json").stdout
    assert raw == neutralize_control_chars(raw)
    assert json.loads(raw)["messages"][0]["content"][0]["text"] == ATTACK + "needle"


def test_an_exported_log_is_escaped_at_a_terminal_only(at_terminal: Any, carrel: Any, hostile: str) -> None:
    terminal = at_terminal("sessions", "export", hostile, columns=20_000)
    assert terminal.end() == 0
    shown = terminal.shown.replace("\r\n", "\n")
    assert shown == neutralize_control_chars(shown)
    raw = carrel("sessions", "export", hostile).stdout
    assert [json.loads(line) for line in shown.splitlines()] == [json.loads(line) for line in raw.split("\n") if line]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_table_fits_the_terminal_and_keeps_its_ids(at_terminal: Any, keep: Any, columns: int) -> None:
    async def write(store: SessionStore) -> None:
        for name in ("0123456789-abcdef-000-1", "0123456789-abcdef-000-2", "fedcba9876543210fedcba", "short"):
            await store.create_session("A rather long title for a session " * 3, session_id=name, model="m")

    keep(write)
    terminal = at_terminal("sessions", "list", columns=columns)
    assert terminal.end() == 0
    shown = ALLOWED.sub("", terminal.shown)
    assert all(len(line.rstrip()) <= columns for line in shown.splitlines())
    for short in ("0123456789-abcdef-000-1", "0123456789-abcdef-000-2", "fedcba98 ", "short "):
        assert short in shown
    assert "fedcba987" not in shown
    assert "…" in shown


def test_no_color_is_respected(at_terminal: Any, stars: str) -> None:
    terminal = at_terminal("sessions", "list", env={"NO_COLOR": "1"})
    assert terminal.end() == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.shown)
    coloured = at_terminal("sessions", "list")
    assert coloured.end() == 0
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", coloured.shown)


def test_a_pipe_that_is_ascii_only_gets_escapes(carrel: Any, keep: Any) -> None:
    async def write(store: SessionStore) -> None:
        await store.append_message("u", user_text_message("grüße 你好"), model="m")

    keep(write)
    done = carrel("sessions", "show", "u", env={"PYTHONIOENCODING": "ascii"})
    assert "gr\\xfc\\xdfe \\u4f60\\u597d" in done.stdout


def test_lone_surrogates_and_huge_numbers_are_printed(carrel: Any, home: Any, stars: str) -> None:
    log = home / "sessions" / stars / "messages.jsonl"
    with log.open("ab") as file:
        file.write(b'{"role":"user","content":[{"type":"text","text":"half \\ud83d of it"}],"n":' + b"9" * 40 + b"}\n")
    assert "half ⟦U+D83D⟧ of it" in carrel("sessions", "show", stars).stdout
    assert json.loads(carrel("sessions", "show", stars, "--json").stdout)["messages"][3]["n"] == int("9" * 40)
    assert "half" in carrel("sessions", "tail", stars, "--no-follow", "--json").stdout
    assert "half" in carrel("sessions", "export", stars, "-f", "html").stdout


def test_usage_fits_a_narrow_terminal(at_terminal: Any, stars: str) -> None:
    terminal = at_terminal("sessions", "usage", stars, columns=40)
    assert terminal.end() == 0
    lines = ALLOWED.sub("", terminal.shown).splitlines()
    assert all(len(line.rstrip()) <= 40 for line in lines)
    assert lines[0].endswith("TOTAL")
    assert "CACHE WRITE" not in lines[0]


def test_a_time_in_the_future_is_shown_as_a_date(at_terminal: Any, keep: Any) -> None:
    async def write(store: SessionStore) -> None:
        await store.create_session("Later", session_id="later", model="m")
        path = store.meta_path("later")
        path.write_text(path.read_text().replace('"updated_at": "20', '"updated_at": "21'))

    keep(write)
    terminal = at_terminal("sessions", "list")
    assert terminal.end() == 0
    assert re.search(r" 21\d\d, ", terminal.shown)
