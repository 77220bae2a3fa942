"""`carrel sessions`: what it prints for people and as JSON."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
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


def test_list_shows_the_newest_first_and_whole_ids(carrel: Any, keep: Any, stars: str) -> None:
    long_id = "a" * 60

    async def more(store: SessionStore) -> None:
        await store.create_session("A title that goes on and on " * 5, session_id=long_id, model="m-2")
        await store.append_message(long_id, user_text_message("hi"))

    keep(more)
    lines = carrel("sessions", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", long_id, stars]
    assert ("A title that goes on and on " * 5).strip() in lines[1]
    assert "\x1b" not in "".join(lines)
    found = json.loads(carrel("sessions", "list", "--json").stdout)
    assert [meta["id"] for meta in found] == [long_id, stars]
    assert [meta["message_count"] for meta in found] == [1, 3]


def test_list_without_sessions(carrel: Any, home: Path) -> None:
    assert carrel("sessions", "list").stdout == f"No sessions in {home / 'sessions'} yet.\n"
    assert json.loads(carrel("sessions", "list", "--json").stdout) == []
    assert not (home / "sessions").exists(), "looking makes nothing"


def test_list_by_folder_tag_archive_and_limit(carrel: Any, keep: Any, stars: str) -> None:
    async def more(store: SessionStore) -> None:
        for name in ("one", "two", "three"):
            await store.create_session(name, session_id=name, model="m", cwd="/elsewhere")
        await store.set_tags("one", ["red", "round"])
        await store.archive("two")

    keep(more)

    def ids(*options: str) -> set[str]:
        return {meta["id"] for meta in json.loads(carrel("sessions", "list", "--json", *options).stdout)}

    assert ids() == {"stars", "one", "three"}
    assert ids("--all") == {"stars", "one", "two", "three"}
    assert ids("--archived") == {"two"}
    assert ids("--cwd", "/elsewhere") == {"one", "three"}
    assert ids("--tag", "red", "--tag", "round") == {"one"}
    assert ids("--tag", "blue") == set()
    assert len(ids("--limit", "2")) == 2
    assert "1 more; --limit 0 shows all" in carrel("sessions", "list", "--limit", "2").stdout
    assert "match (1 archived; --all shows them too)." in carrel("sessions", "list", "--tag", "blue").stdout


@pytest.mark.parametrize("name", ["stars", "sta", "last"])
def test_a_session_is_named_by_its_id_its_start_or_last(carrel: Any, stars: str, name: str) -> None:
    assert "Why do stars twinkle?" in carrel("sessions", "show", name).stdout


def test_show_reads_like_a_conversation(carrel: Any, keep: Any) -> None:
    async def write(store: SessionStore) -> None:
        call = tool_use_block(tool_id="t", name="read_file", input={"path": "x.py"})
        result = tool_result_block(tool_use_id="t", model_text="\n".join(map(str, range(100))), is_error=True)
        await store.append_many(
            "s1",
            [
                user_text_message("Look."),
                assistant_message([text_block("I will."), call]),
                build_message("user", [result]),
            ],
            model="m-1",
        )

    keep(write)
    shown = carrel("sessions", "show", "s1").stdout
    assert shown.startswith("Look.\ns1 · m-1 · ")
    assert 'User\nLook.\n\nAssistant\nI will.\n→ read_file {"path": "x.py"}\n\nTool\n✗ 0\n  1\n' in shown
    assert "more lines; --full shows them" in shown
    assert "\n  99\n" in carrel("sessions", "show", "s1", "--full").stdout
    document = json.loads(carrel("sessions", "show", "s1", "--json").stdout)
    assert document["session"]["id"] == "s1"
    assert [message["role"] for message in document["messages"]] == ["user", "assistant", "user"]
    assert len(json.loads(carrel("sessions", "show", "s1", "--json", "--limit", "1").stdout)["messages"]) == 1


def test_show_entries_is_the_numbered_log(carrel: Any, keep: Any, stars: str) -> None:
    async def rewind(store: SessionStore) -> None:
        await store.append_rewind(stars, 1)
        await store.label(stars, "here", 1)

    keep(rewind)
    assert carrel("sessions", "show", stars, "--entries").stdout.splitlines() == [
        "     1  user       Why do stars twinkle?",
        "     2  assistant  Because moving air bends their light.",
        "     3  user       And planets?",
        "     4  rewind     Rewound to 1 message",
        "     5  rewind     Labelled entry 1: here",
    ]
    lines = carrel("sessions", "show", stars, "--entries", "--json", "--limit", "2").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [4, 5]
    assert json.loads(lines[1])["entry"]["meta"]["text"] == "here"


def test_an_unreadable_line_is_reported(carrel: Any, home: Path, stars: str) -> None:
    log = home / "sessions" / stars / "messages.jsonl"
    with log.open("ab") as file:
        file.write(b"{broken\n")
    done = carrel("sessions", "show", stars)
    assert "And planets?" in done.stdout
    assert done.stderr.startswith("note: ")
    assert "line 4" in done.stderr
    assert "Line 4 could not be read" in carrel("sessions", "show", stars, "--entries").stdout


def test_tail_without_follow(carrel: Any, keep: Any, stars: str) -> None:
    async def more(store: SessionStore) -> None:
        await store.append_many(stars, [user_text_message(f"number {n}") for n in range(4, 21)])

    keep(more)
    lines = carrel("sessions", "tail", stars, "--no-follow", "--json").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(11, 21))
    shown = carrel("sessions", "tail", stars, "--no-follow", "--from-seq", "20").stdout
    assert shown == "20  User\nnumber 20\n\n"


def test_tail_follows_what_another_process_writes_until_interrupted(
    environment: dict[str, str], keep: Any, stars: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", "sessions", "tail", stars, "--json", "--from-seq", "3"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert json.loads(process.stdout.readline())["seq"] == 3

        async def write(store: SessionStore) -> None:
            await store.append_message(stars, user_text_message("added just now"))

        keep(write)
        assert "added just now" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_search_marks_the_words(carrel: Any, at_terminal: Any, stars: str) -> None:
    shown = carrel("sessions", "search", "moving", "air").stdout
    assert "Because moving air bends their light." in shown
    assert stars in shown
    hits = json.loads(carrel("sessions", "search", "twinkle", "--json", "--limit", "1").stdout)
    assert len(hits) == 1
    assert hits[0]["session_id"] == stars
    terminal = at_terminal("sessions", "search", "twinkle")
    assert terminal.end() == 0
    assert "\x1b[1;33mtwinkle\x1b[0m" in terminal.shown


def test_fork_makes_another_session_up_to_an_entry(carrel: Any, stars: str) -> None:
    made = json.loads(carrel("sessions", "fork", stars, "--at", "2", "--title", "The moon", "--json").stdout)
    assert made["title"] == "The moon"
    assert made["parent_session_id"] == stars
    shown = carrel("sessions", "show", made["id"]).stdout
    assert "bends their light" in shown
    assert "And planets?" not in shown
    children = json.loads(carrel("sessions", "children", stars, "--json").stdout)
    assert [meta["id"] for meta in children] == [made["id"]]
    assert "The moon" in carrel("sessions", "children", stars).stdout
    assert carrel("sessions", "children", made["id"]).stdout == f"{made['id']} has no children.\n"
    assert "has 3 messages." in carrel("sessions", "fork", stars).stdout


def test_a_rewind_can_be_undone(carrel: Any, stars: str) -> None:
    printed = carrel("sessions", "rewind", stars, "--to", "1").stdout
    assert printed == "Rewound: 1 message visible. `carrel sessions rewind stars --to-seq 3` undoes it.\n"
    assert "And planets?" not in carrel("sessions", "show", stars).stdout
    undone = json.loads(carrel("sessions", "rewind", stars, "--to-seq", "3", "--json").stdout)
    assert undone == {"session_id": stars, "seq": 5, "visible_messages": 3, "undo_to_seq": 4}
    assert "And planets?" in carrel("sessions", "show", stars).stdout


def test_label_tag_rename_and_archive(carrel: Any, stars: str) -> None:
    assert (
        carrel("sessions", "label", stars, "a good place", "--at", "2").stdout
        == "Labelled entry 2 of stars: a good place\n"
    )
    assert json.loads(carrel("sessions", "label", stars, "end", "--json").stdout)["text"] == "end"
    assert carrel("sessions", "tag", stars, "b", "a").stdout == "stars is tagged a, b.\n"
    assert carrel("sessions", "tag", stars, "b", "--remove").stdout == "stars is tagged a.\n"
    assert json.loads(carrel("sessions", "tag", stars, "--json").stdout)["tags"] == ["a"]
    assert carrel("sessions", "rename", stars, "Night").stdout == "stars has the new title Night.\n"
    assert carrel("sessions", "archive", stars).stdout == "stars is archived.\n"
    assert json.loads(carrel("sessions", "list", "--json").stdout) == []
    assert json.loads(carrel("sessions", "unarchive", stars, "--json").stdout)["archived_at"] is None
    (meta,) = json.loads(carrel("sessions", "list", "--json").stdout)
    assert (meta["title"], meta["tags"]) == ("Night", ["a"])


def test_delete_asks_for_confirmation(at_terminal: Any, home: Path, stars: str) -> None:
    folder = home / "sessions" / stars
    terminal = at_terminal("sessions", "delete", stars)
    terminal.wait_for("Delete this session for ever? [y/N] ")
    terminal.press("n\n")
    assert terminal.end() == 1
    assert folder.exists()
    terminal = at_terminal("sessions", "delete", stars)
    terminal.wait_for("[y/N] ")
    terminal.press("y\n")
    assert terminal.end() == 0
    assert not folder.exists()


def test_delete_without_a_terminal_needs_yes(carrel: Any, home: Path, stars: str) -> None:
    assert "--yes" in carrel("sessions", "delete", stars, code=2).stderr
    assert (home / "sessions" / stars).exists()
    assert carrel("sessions", "delete", stars, "--yes").stdout == "Deleted stars.\n"
    assert not (home / "sessions" / stars).exists()


def test_prune_without_yes_only_lists(carrel: Any, keep: Any, home: Path, stars: str) -> None:
    async def old(store: SessionStore) -> None:
        for name in ("old", "marked"):
            await store.append_message(name, user_text_message(name), model="m")
        await store.label("marked", "keep me")

    keep(old)
    for name in ("old", "marked", stars):
        meta = home / "sessions" / name / "meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"updated_at": "2020-01-01T00:00:00+00:00"}))
    assert json.loads(carrel("sessions", "prune", "--older-than", "30d", "--json").stdout)["deleted"] is False
    printed = carrel("sessions", "prune", "--older-than", "30d").stdout
    assert "2 sessions would be deleted; --yes does it." in printed
    assert (home / "sessions" / "old").exists()
    assert "Deleted 2 sessions." in carrel("sessions", "prune", "--older-than", "4w", "--yes").stdout
    assert [meta["id"] for meta in json.loads(carrel("sessions", "list", "--json").stdout)] == ["marked"]
    assert carrel("sessions", "prune", "--older-than", "12h").stdout == "No session is that old.\n"
    assert "1 session would be" in carrel("sessions", "prune", "--older-than", "12h", "--labelled").stdout


def test_messages_are_counted_before_a_deletion(
    carrel: Any, at_terminal: Any, home: Path, environment: dict[str, str]
) -> None:
    program = """
import asyncio, carrel
async def main():
    store = carrel.SessionStore()
    for number in range(50):
        await store.append_message("busy", carrel.user_text_message(f"important {number}"))
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    os.utime(home / "sessions" / "busy" / "messages.jsonl", (0, 0))
    meta = home / "sessions" / "busy" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"updated_at": "2020-01-01T00:00:00+00:00"}))
    terminal = at_terminal("sessions", "delete", "busy")
    terminal.wait_for("[y/N] ")
    assert "50" in terminal.shown
    terminal.press("n\n")
    assert terminal.end() == 1
    (found,) = json.loads(carrel("sessions", "prune", "--older-than", "30d", "--json").stdout)["sessions"]
    assert found["message_count"] == 50
    printed = carrel("sessions", "prune", "--older-than", "30d", "--yes").stdout
    assert printed.splitlines()[1].split()[:4] == ["busy", "important", "0", "50"]


def test_a_session_of_a_newer_carrel_is_never_pruned(carrel: Any, home: Path, stars: str) -> None:
    meta = home / "sessions" / stars / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"message_format_version": 6}))
    os.utime(home / "sessions" / stars / "messages.jsonl", (0, 0))
    assert " ? " in carrel("sessions", "list").stdout.splitlines()[1]
    done = carrel("sessions", "prune", "--older-than", "30d", "--labelled", "--yes")
    assert done.stdout == "No session is that old.\n"
    assert f"a newer carrel wrote them: {stars}" in done.stderr
    assert meta.exists()


def test_usage_with_prices(carrel: Any, stars: str, tmp_path: Path) -> None:
    plain = carrel("sessions", "usage", stars).stdout
    assert "COST" not in plain
    assert plain.splitlines()[1].split() == ["m-1", "12", "9", "0", "0", "21"]
    (tmp_path / "prices.json").write_text('{"m-1": {"input": 1000000, "output": 2000000}}')
    spent = json.loads(carrel("sessions", "usage", stars, "--prices", "prices.json", "--json").stdout)
    assert spent["total"]["cost"] == 30.0
    assert "30.0000" in carrel("sessions", "usage", stars, "--prices", "prices.json").stdout


def test_export_writes_a_file_once(carrel: Any, stars: str, tmp_path: Path) -> None:
    assert carrel("sessions", "export", stars, "-o", "s.html").stdout.startswith("Wrote s.html (")
    page = (tmp_path / "s.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "bends their light" in page
    (tmp_path / "s.html").write_text("mine")
    assert "--force" in carrel("sessions", "export", stars, "-o", "s.html", code=2).stderr
    assert (tmp_path / "s.html").read_text() == "mine"
    printed = json.loads(carrel("sessions", "export", stars, "-o", "s.html", "--force", "--json").stdout)
    assert printed["bytes"] == (tmp_path / "s.html").stat().st_size == len(page.encode())
    assert carrel("sessions", "export", stars, "-f", "markdown").stdout.startswith("# Stars\n")
    lines = carrel("sessions", "export", stars).stdout.splitlines()
    assert [json.loads(line)["role"] for line in lines] == ["user", "assistant", "user"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "s.html"], "nothing is left beside it"


def test_import_accounts_for_every_line(carrel: Any, tmp_path: Path, keep: Any, stars: str) -> None:
    other = tmp_path / "other"
    printed = carrel("sessions", "import", tmp_path / "home" / "sessions" / stars, "--base", other).stdout
    assert "IMPORTED" in printed
    assert "UNREADABLE" in printed
    assert "bends their light" in carrel("sessions", "show", "last", "--base", other).stdout
    document = json.loads(
        carrel(
            "sessions", "import", tmp_path / "home" / "sessions" / stars, "--base", tmp_path / "third", "--json"
        ).stdout
    )
    assert document["imports"][0]["imported"] == 3
    assert document["refused"] == []


def test_secrets_are_reported_at_import_and_replaced_on_request(carrel: Any, tmp_path: Path) -> None:
    password = "q8Xk2vPz" + "71LmNd4R"
    lines = [user_text_message(f"log in with password: {password}"), assistant_message([text_block("Done.")])]
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "s" / "meta.json").write_text(json.dumps({"id": "s", "title": f"password: {password}"}))
    plain, clean = tmp_path / "plain", tmp_path / "clean"
    found = carrel("sessions", "import", tmp_path / "s", "--base", plain).stdout
    assert "1 message with what looks like keys, tokens or passwords; --redact replaces them" in found
    assert password in carrel("sessions", "export", "last", "--base", plain).stdout
    for form in ("jsonl", "markdown", "html"):
        exported = carrel("sessions", "export", "last", "--redact", "--format", form, "--base", plain).stdout
        assert password not in exported
        assert "[redacted:" in exported
    found = carrel("sessions", "import", tmp_path / "s", "--redact", "--base", clean).stdout
    assert "1 message with what looks like keys, tokens or passwords: replaced" in found
    assert not [path for path in clean.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]


def test_import_of_an_unknown_format_fails(carrel: Any, tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("roses are red\n")
    assert "poem.txt" in carrel("sessions", "import", "poem.txt", code=1).stderr


@pytest.mark.parametrize("option", ["--base", "--data"])
def test_base_may_be_a_folder_of_sessions_and_data_is_its_former_name(
    carrel: Any, home: Path, stars: str, tmp_path: Path, option: str
) -> None:
    elsewhere = {"CARREL_HOME": str(tmp_path)}
    for folder in (home, home / "sessions"):
        assert "Stars" in carrel("sessions", "list", option, folder, env=elsewhere).stdout
    assert "--data" not in carrel("sessions", "list", "--help").stdout


def test_tree_shows_ancestors_and_forks(carrel: Any, stars: str) -> None:
    child = json.loads(carrel("sessions", "fork", stars, "--title", "Child", "--json").stdout)["id"]
    grandchild = json.loads(carrel("sessions", "fork", child, "--title", "Grandchild", "--json").stdout)["id"]
    for start in (stars, child, grandchild):
        tree = json.loads(carrel("sessions", "tree", start, "--json").stdout)
        assert [(one["id"], one["depth"]) for one in tree] == [(stars, 0), (child, 1), (grandchild, 2)]
    lines = carrel("sessions", "tree", child).stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [stars, "3", lines[1].split()[2]],
        ["└", child, "←"],
        ["│", "└", grandchild],
    ]


def test_trace_shows_steps_below_the_run_that_made_them(carrel: Any, home: Path, stars: str) -> None:
    assert "has no trace" in carrel("sessions", "trace", stars).stdout
    steps: list[dict[str, Any]] = [
        {"id": "c", "kind": "tool", "name": "curl.get", "parent": "r", "outcome": "timeout", "error_type": "Timeout"},
        {"id": "r", "kind": "run", "name": "tools.curl.get()", "outcome": "error", "error": "Traceback\nKeyError: 1"},
        {"id": "v", "kind": "verify", "name": "calc-1", "outcome": "ok"},
    ]
    seconds = {"c": 1, "r": 0, "v": 2}
    for step in steps:
        step |= {"started_at": f"2099-01-01T10:00:0{seconds[step['id']]}+00:00", "duration": 0.5}
    trace = home / "sessions" / "abc1" / "trace.jsonl"
    trace.parent.mkdir(parents=True)
    trace.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    lines = carrel("sessions", "trace", "abc").stdout.splitlines()
    assert [[*re.split(r"  +", line)[:2], line.split("0.500  ")[-1].split()[0]] for line in lines[1:]] == [
        ["10:00:00", "0.500", "run"],
        ["10:00:01", "0.500", "└"],
        ["10:00:02", "0.500", "verify"],
    ]
    assert "KeyError: 1" in lines[1]
    assert "Timeout" in lines[2]
    assert json.loads(carrel("sessions", "trace", "abc1", "--json", "--limit", "1").stdout) == steps[2:]


def test_a_pipe_closed_early_is_no_error(environment: dict[str, str], keep: Any) -> None:
    async def write(store: SessionStore) -> None:
        await store.append_many("long", [user_text_message(f"line {n} " + "x" * 200) for n in range(3000)])

    keep(write)
    for words in ("show long", "show long --entries", "show long --entries --json", "export long"):
        command = f"set -o pipefail; {shlex.quote(sys.executable)} -m carrel sessions {words} | head -n 1"
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout.count("\n") == 1


def test_importing_a_file_twice(carrel: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text(json.dumps(user_text_message("What is a carrel?")) + "\n")
    carrel("sessions", "import", file)
    [meta] = json.loads(carrel("sessions", "list", "--json").stdout)
    assert f"already here as {meta['id']}" in carrel("sessions", "import", file).stdout
    file.write_text(file.read_text() + json.dumps(user_text_message("Whose?")) + "\n")
    assert "1 entry added to it" in carrel("sessions", "import", file).stdout
    assert "already here" not in carrel("sessions", "import", "--again", file).stdout
    assert len(json.loads(carrel("sessions", "list", "--json").stdout)) == 2


def test_a_trace_without_a_conversation_can_be_deleted(carrel: Any, home: Path) -> None:
    trace = home / "sessions" / "abc1" / "trace.jsonl"
    trace.parent.mkdir(parents=True)
    trace.write_text("{}\n")
    assert "only a trace" in carrel("sessions", "show", "abc1", code=2).stderr
    assert carrel("sessions", "delete", "abc", "--yes").stdout == "Deleted abc1.\n"
    assert not trace.parent.exists()


def test_a_trace_without_a_conversation_is_pruned_by_its_age(carrel: Any, home: Path, stars: str) -> None:
    trace = home / "sessions" / "abc1" / "trace.jsonl"
    trace.parent.mkdir(parents=True)
    trace.write_text("{}\n")
    os.utime(trace, (0, 0))
    assert "abc1" in carrel("sessions", "prune", "--older-than", "1w").stdout
    printed = json.loads(carrel("sessions", "prune", "--older-than", "1w", "--yes", "--json").stdout)
    assert [meta["id"] for meta in printed["sessions"]] == ["abc1"]
    assert not trace.parent.exists()
    assert (home / "sessions" / stars).exists()


def test_an_export_follows_links_and_pipes(carrel: Any, stars: str, tmp_path: Path) -> None:
    (tmp_path / "link.md").symlink_to("real.md")
    (tmp_path / "real.md").write_text("old")
    carrel("sessions", "export", stars, "-o", "link.md", "--force")
    assert (tmp_path / "link.md").is_symlink()
    assert "twinkle" in (tmp_path / "real.md").read_text()
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    carrel("sessions", "export", stars, "-o", "pipe", "--force")
    assert b"twinkle" in os.read(reading, 65536)
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()
    carrel("sessions", "export", stars, "-o", "x" * 252 + ".md")
