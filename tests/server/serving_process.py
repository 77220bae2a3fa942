"""A server as its users have it: the installed command, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.preloaded_python import ForkedProcess, preloaded_python

DEADLINE = 60.0


class Serving:
    """`carrel serve` on a folder; `start` again after `kill` goes on with the same data."""

    def __init__(self, folder: Path, *words: object, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._words = [str(word) for word in words]
        self._env = {
            **os.environ,
            "CARREL_HOME": str(folder / "home"),
            "TMPDIR": str(self.temporary),
            **(env or {}),
        }
        self._process: ForkedProcess | None = None
        self.url = ""
        self.key = ""

    def start(self) -> Serving:
        words = ["-m", "carrel", "serve", "--port", "0", "--data", self.data, "--json", *self._words]
        self._process = preloaded_python().start(words, self._env, session=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server did not start: {self._process.wait()}"
        told = json.loads(line)
        self.url = told["url"]
        self.key = told["key"] or self.key
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def add_key(self, name: str, *words: str) -> str:
        return self._keys("add", name, *words).strip()

    def keys(self, *words: str) -> Any:
        """What `carrel keys …` says."""
        return json.loads(self._keys(*words, "--json"))

    def _keys(self, *words: str) -> str:
        done = preloaded_python().run(["-m", "carrel", "keys", *words, "--data", self.data], self._env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def client(self, key: str | None = None, **more: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=DEADLINE, **more)

    def kill(self) -> None:
        """Kill the server and wait until all its processes are gone; its temporary folder goes at the next start."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As Ctrl-C does it; returns the exit code."""
        return self._end(signal.SIGINT)

    def _end(self, how: signal.Signals) -> int:
        if self._process is None:
            return 0
        family = descendants(self._process.pid)
        self._process.send_signal(how)
        code = self._process.wait(DEADLINE)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None
        until = time.monotonic() + DEADLINE
        while (left := [who for who in family if alive(who)]) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"still running: {left}"
        if how == signal.SIGKILL:
            return code
        while (folders := list(self.temporary.iterdir())) and time.monotonic() < until:
            time.sleep(0.02)
        assert not folders, f"left behind: {folders}"
        return code


def descendants(pid: int) -> list[tuple[int, str]]:
    """All processes that came of one, each with when it began, so that a number used again is no mistake."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _fields(int(entry.name))) is not None:
            children.setdefault(int(parent[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            fields = _fields(child)
            if fields is not None:
                found.append((child, fields[19]))
                todo.append(child)
    return found


def alive(who: tuple[int, str]) -> bool:
    fields = _fields(who[0])
    return fields is not None and fields[19] == who[1] and fields[0] != "Z"


def _fields(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def ready(client: httpx.Client, **body: Any) -> str:
    """A session's id, once it is ready."""
    answer = client.post("/sessions", json=body, headers={"Prefer": "wait=55"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "ready", answer.text
    session_id: str = answer.json()["session_id"]
    return session_id


def executed(client: httpx.Client, session_id: str, command: str, **body: Any) -> dict[str, Any]:
    """What came of a command."""
    answer = client.post(
        f"/sessions/{session_id}/exec", json={"command": command, **body}, headers={"Prefer": "wait=55"}
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told
