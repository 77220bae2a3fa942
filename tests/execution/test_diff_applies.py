"""A diff of a workspace, given to the programs that take one: the folder as it was becomes the folder as it is."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carrel.execution.file_changes import seen_below, unchanged_folder, unified

Content = str | bytes | Path
"""A text; with the executable bit where it is bytes; a path is a link to it."""
Files = dict[str, Content]
TOOLS = (["git", "apply", "--whitespace=nowarn"], ["patch", "-p1", "--quiet", "--no-backup-if-mismatch", "-i"])


def made(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            path.chmod(0o755 if isinstance(content, bytes) else 0o644)
    return folder


def looks(folder: Path) -> dict[str, tuple[str, bytes]]:
    found = {}
    for name, seen in seen_below(folder).items():
        path = folder / name
        found[name] = (seen.mode, os.readlink(os.fsencode(path)) if seen.kind == "link" else path.read_bytes())
    return found


def difference(before: Path, after: Path) -> str:
    async def read(path: str) -> bytes:
        return (after / path).read_bytes()

    return asyncio.run(unified(unchanged_folder(before), seen_below(after), read))


def applied(before: Files, after: Files, tools: Sequence[list[str]] = TOOLS) -> str:
    """The diff, after each of the programs has made of one folder the other."""
    with tempfile.TemporaryDirectory() as place:
        old, new = made(Path(place, "old"), before), made(Path(place, "new"), after)
        old.mkdir(exist_ok=True)
        new.mkdir(exist_ok=True)
        diff = difference(old, new)
        patch = Path(place, "diff")
        patch.write_bytes(diff.encode())
        for tool in tools if diff else ():
            copy = Path(place, tool[0])
            shutil.copytree(old, copy, symlinks=True)
            environment = {**os.environ, "GIT_CEILING_DIRECTORIES": place, "LC_ALL": "C.UTF-8"}
            done = subprocess.run([*tool, str(patch)], cwd=copy, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, (tool[0], done.stdout, done.stderr, diff)
            assert looks(copy) == looks(new), (tool[0], done.stdout, done.stderr, diff)
        return diff


@pytest.mark.parametrize(
    "letter", ["\f", "\v", "\x1c", "\x85", "\u2028", "\u2029", "\r", "\r\n", "\x1e", "\ufeff"], ids=ascii
)
def test_a_line_ends_where_other_programs_end_it(letter: str) -> None:
    lines = [f"one{letter}more\n", "two\n", f"{letter}three\n", "four\n", "five\n", f"six{letter}\n", "seven"]
    applied({"f.c": "".join(lines)}, {"f.c": "".join([*lines[:3], "FOUR\n", *lines[4:]])})
    applied({}, {"f.c": "".join(lines)})


@pytest.mark.parametrize(
    "name",
    [
        "a b/c d",
        'say "hi"',
        "back\\slash",
        "tab\there",
        "line\nfeed",
        "grüße",
        "\u2028",
        " first",
        "last ",
        "-p",
        "bell\a",
    ],
)
def test_names_that_are_odd(name: str) -> None:
    applied({name: "one\n", "kept": "1\n"}, {name: "two\n", "kept": "1\n"})
    applied({}, {name: "one\n"})
    applied({name: "one\n"}, {})


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    diff = applied({}, {name: "one\n"})
    assert 'diff --git "a/caf\\351" "b/caf\\351"\n' in diff


def test_empty_files_and_modes() -> None:
    assert applied({}, {"empty": ""}).startswith("diff --git a/empty b/empty\nnew file mode 100644\n")
    assert "deleted file mode 100644\n" in applied({"empty": ""}, {})
    assert applied({"run": "#!\n"}, {"run": b"#!\n"}) == "diff --git a/run b/run\nold mode 100644\nnew mode 100755\n"
    applied({"run": b"#!\n"}, {"run": "#!/bin/sh\n"})
    applied({}, {"run": b"#!/bin/sh\n"})
    applied({"a": "1\n"}, {"a": ""})
    applied({"a": ""}, {"a": "1\n"})


def test_a_link_is_where_it_leads() -> None:
    diff = applied({"f": "text\n"}, {"f": "text\n", "l": Path("f")})
    assert "new file mode 120000\n" in diff
    assert "+f\n\\ No newline at end of file\n" in diff
    assert "text" not in diff
    applied({"f": "1\n", "l": Path("f")}, {"f": "1\n", "l": Path("nowhere/at all")})
    applied({"l": Path("f")}, {})


def test_a_link_in_the_place_of_a_file() -> None:
    applied({"a": "text\n", "b": "2\n"}, {"a": Path("b"), "b": "2\n"})
    applied({"a": Path("b"), "b": "2\n"}, {"a": "text\n", "b": "2\n"})


def test_a_folder_in_the_place_of_a_file() -> None:
    # `patch` removes what goes only at its end, so that the other has no room.
    applied({"a": "text\n"}, {"a/b": "text\n"}, TOOLS[:1])
    applied({"a/b": "text\n", "a/c": "more\n"}, {"a": "text\n"}, TOOLS[:1])


def test_what_is_no_text_is_named_and_keeps_nothing_else_from_being_taken(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", {"m": "1\n"}), made(tmp_path / "new", {"empty": "", "m": "2\n"})
    (new / "raw").write_bytes(b"\0\1")
    (new / "__pycache__").mkdir()
    (new / "__pycache__" / "m.cpython-311.pyc").write_bytes(b"\0\1")
    diff = difference(old, new)
    assert diff.startswith("Binary files /dev/null and b/raw differ\ndiff --git a/empty b/empty\n")
    for tool in TOOLS:
        copy = shutil.copytree(old, tmp_path / tool[0])
        subprocess.run([*tool, "-"], cwd=copy, input=diff.encode(), check=True)
        assert looks(copy) == {name: look for name, look in looks(new).items() if not name.endswith(("raw", "pyc"))}


def test_only_the_mode_of_what_is_no_text(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", {"m": b"\0"}), made(tmp_path / "new", {"m": b"\0"})
    (new / "m").chmod(0o644)
    assert difference(old, new) == "diff --git a/m b/m\nold mode 100755\nnew mode 100644\n"


lines = st.sampled_from(["a", "b", "c", "", " ", "\r", "\f", "\u2028x", "-- x", "++ x", "\\"])
texts = st.lists(lines, max_size=8).map("\n".join)
contents = st.one_of(texts, texts.map(str.encode), st.sampled_from([Path("f"), Path("d/x")]))
trees = st.dictionaries(st.sampled_from(["f", "g h", "d/x", "d/y", "e/z\tz"]), contents, max_size=5)


@given(trees, trees)
@settings(max_examples=60, deadline=None)
@example({"f": "a\n"}, {"f": "a"})
def test_any_two_folders(before: Files, after: Files) -> None:
    applied(before, after)
