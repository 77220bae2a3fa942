"""`carrel serve` in a process of its own, as users start it, and short ways to use its HTTP API."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.preloaded_python import ForkedProcess, preloaded_python

DEADLINE = 60.0


class ServerProcess:
    """`carrel serve` on a folder; `start` again after `kill` or `stop` continues with the same data and port."""

    def __init__(self, folder: Path, *options: object, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.options = [str(option) for option in options]
        self._env = {
            **os.environ,
            "CARREL_HOME": str(folder / "home"),
            "TMPDIR": str(self.temporary),
            **(env or {}),
        }
        self._process: ForkedProcess | None = None
        self.port = 0
        self.url = ""
        self.key = ""

    def start(self) -> ServerProcess:
        words = ["-m", "carrel", "serve", "--port", self.port, "--data", self.data, "--json", *self.options]
        with (self.folder / "stderr").open("ab") as stderr:
            self._process = preloaded_python().start(words, self._env, stderr=stderr, session=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server did not start: {self._process.wait()} {self.stderr}"
        started = json.loads(line)
        self.url, self.key = started["url"], started["key"] or self.key
        self.port = int(self.url.rpartition(":")[2].partition("/")[0])
        return self

    @property
    def stderr(self) -> str:
        """Everything that the server has written to its standard error."""
        return (self.folder / "stderr").read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def add_key(self, name: str, *words: str) -> str:
        return self._keys("add", name, *words).strip()

    def keys(self, *words: str) -> Any:
        """Return the output of `carrel keys … --json`."""
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

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        """End the server, by default as Ctrl-C does, and return its exit code; nothing of it may be left."""
        return self._end(how)

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
        while (left := [process for process in family if is_alive(process)]) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"still running: {left}"
        if how == signal.SIGKILL:
            return code
        while (folders := list(self.temporary.iterdir())) and time.monotonic() < until:
            time.sleep(0.02)
        assert not folders, f"left behind: {folders}"
        return code


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return all processes below one, each with its start time, because numbers are used again."""
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


def is_alive(process: tuple[int, str]) -> bool:
    fields = _fields(process[0])
    return fields is not None and fields[19] == process[1] and fields[0] != "Z"


def _fields(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def create_session(client: httpx.Client, **body: Any) -> str:
    """Create a session, and return its id when it is ready."""
    answer = client.post("/sessions", json=body, headers={"Prefer": "wait=55"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "ready", answer.text
    session_id: str = answer.json()["session_id"]
    return session_id


def run_command(client: httpx.Client, session_id: str, command: str, **body: Any) -> dict[str, Any]:
    """Run a command and return its interaction."""
    answer = client.post(
        f"/sessions/{session_id}/exec", json={"command": command, **body}, headers={"Prefer": "wait=55"}
    )
    assert answer.status_code == 200, answer.text
    interaction: dict[str, Any] = answer.json()
    return interaction


def write_dataset(folder: Path, samples: list[dict[str, Any]]) -> Path:
    """Write a dataset with these samples, without the files that they name."""
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return folder


@contextmanager
def logged_in(server: ServerProcess, key: str) -> Iterator[httpx.Client]:
    """Log in to the web page with a key."""
    url = server.url.removesuffix("/api/v1")
    with httpx.Client(base_url=url, headers={"Origin": url}, timeout=60) as client:
        assert client.post("/enter", data={"key": key}).status_code == 303
        yield client
