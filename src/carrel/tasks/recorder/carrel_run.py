#!/usr/bin/env -S python3 -IS
"""Runs a test program that `cargo test` or `go test` has built, and notes for the host how it really ended.

Standard library only, and any Python from 3.6 on. Such a program prints its results where the code under test prints
too. Both kinds can be asked for a file besides: libtest writes a line for each test that has ended, Go's testing a
profile when all have. Code that prints results and leaves writes neither.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

LIBTEST = b"Write logs to the specified file"
"""In every program that libtest is in: what its `--help` says of `--logfile`."""


def main(words: list[str]) -> int:
    said = os.environ.pop("CARREL_TESTIMONY", "")
    kind = kind_of(words[0])
    if not said or not kind:
        os.execvp(words[0], words)
    notes = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    number = f"{os.getpid()}-{os.urandom(4).hex()}"

    def say(**what: Any) -> None:
        os.write(notes, (json.dumps({"run": number, **what}) + "\n").encode("ascii"))

    say(event="begun", program=words[0])
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        file = os.path.join(folder, "ended")
        asked = ["--logfile", file] if kind == "libtest" else go_words(file)
        status = subprocess.run([words[0], *asked, *words[1:]]).returncode
        if kind == "libtest":
            for outcome, name in logged(file):
                say(event="test", id=name, outcome=outcome)
            if os.path.exists(file):
                # Libtest makes it before the first test; without it, none was even begun.
                say(event="finished", status=status)
        elif os.path.exists(file) and os.path.getsize(file):
            say(event="finished", status=status, unnamed=True)
    return status if status >= 0 else 128 - status


def go_words(file: str) -> list[str]:
    return [f"-test.mutexprofile={file}", "-test.mutexprofilefraction=0"]


def kind_of(program: str) -> str:
    """`libtest` or `go`; empty for what is no test program, or another kind of one."""
    if program.endswith(".test"):
        return "go"
    if os.path.basename(os.path.dirname(program)) != "deps":
        return ""
    with open(program, "rb") as file:
        return "libtest" if LIBTEST in file.read() else ""


def logged(file: str) -> list[tuple[str, str]]:
    words = {"ok": "passed", "failed": "failed", "ignored": "skipped"}
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            parts = [line.rstrip("\n").partition(" ") for line in lines]
    except FileNotFoundError:
        return []
    return [(words.get(word, "failed"), name) for word, _, name in parts]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
