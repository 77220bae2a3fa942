"""What a Redis did, in its order (MONITOR): each entry of a session's log must come from the holder of its lease."""

from __future__ import annotations

import codecs
import re
import socket
import threading
from collections import Counter, defaultdict

import orjson

_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_LEASE = re.compile(r"cluster/nodes/([^/]+)/lease")
_LOG = re.compile(r"carrel:log:server/sessions/([^/]+)/log\.jsonl")
_OPEN = ("pending", "running")


class LeaseMonitor:
    """Reads what the server does in a thread, and checks the writes to the logs of sessions."""

    def __init__(self, port: int) -> None:
        self.wrong: list[str] = []
        self.entries = 0
        self.operations: dict[str, Counter[str]] = defaultdict(Counter)
        """Begun commands and verifications, by session."""
        self.unfinished: dict[str, set[str]] = defaultdict(set)
        self.sessions: dict[str, dict[str, object]] = {}
        """The last record of each session."""
        self._leases: dict[str, str] = {}
        """The stamps of the leases that are held, by node."""
        self._script: bytes = b""
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"MONITOR\r\n")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End when everything was read that was done until now."""
        with socket.create_connection(self._socket.getpeername()) as last:
            last.sendall(b"ECHO the-last-line\r\n")
            self._thread.join(60)
        self._socket.close()
        assert not self._thread.is_alive()

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                if b'"the-last-line"' in line:
                    return
                try:
                    self._take(line)
                except Exception as problem:  # noqa: BLE001 -- it would end the thread unseen
                    self.wrong.append(f"{problem!r}: {line[:300]!r}")

    def _take(self, line: bytes) -> None:
        if b'"EVALSHA"' in line or b'"EVAL"' in line:
            self._script = line
        elif b" lua] " not in line or b'"carrel:' not in line:
            return
        elif b'"XADD"' in line and b"/log.jsonl" in line:
            _, key, _, _, record = _words(line)
            if (log := _LOG.fullmatch(key)) is not None:
                self._check(log[1], orjson.loads(record.encode("latin-1")))
        elif b'"UNLINK"' in line and b"/log.jsonl" in line:
            for session_id in _LOG.findall(line.decode("latin-1")):
                # It could not be created completely.
                for known in (self.sessions, self.operations, self.unfinished):
                    known.pop(session_id, None)
        elif b"/lease" in line:
            words = _words(line)
            if (lease := _LEASE.fullmatch(words[2] if words[0] in ("HSET", "HDEL") else "")) is not None:
                if words[0] == "HSET":
                    self._leases[lease[1]] = " ".join(words[3].split(" ")[1:4])
                else:
                    self._leases.pop(lease[1], None)

    def _check(self, session_id: str, entry: dict[str, str]) -> None:
        """Check the guard of the script that has just written this entry."""
        self.entries += 1
        guard, stamp = _words(self._script)[6:8]
        lease = _LEASE.fullmatch(guard)
        if lease is None or self._leases.get(lease[1]) != stamp:
            self.wrong.append(f"{session_id}: {entry['type']} by {guard} {stamp}, held are {self._leases}")
            return
        before = self.sessions.get(session_id)
        if entry["type"] == "session":
            if before is not None and before["node"] != entry["node"] and before["lifecycle"] == "live":
                self.wrong.append(f"{session_id}: it was live on {before['node']} and came to {entry['node']}")
            self.sessions[session_id] = before = dict(entry)
        if before is None or before["node"] != lease[1]:
            self.wrong.append(f"{session_id}: {entry['type']} by {lease[1]}, but it is on {before and before['node']}")
        name = entry.get("interaction_id") or entry.get("job_id")
        if entry["type"] in ("interaction", "job") and name is not None:
            self.operations[session_id][name] += entry["status"] == "pending"
            (self.unfinished[session_id].add if entry["status"] in _OPEN else self.unfinished[session_id].discard)(name)


def _words(line: bytes) -> list[str]:
    return [codecs.escape_decode(word)[0].decode("latin-1") for word in _WORD.findall(line)]
