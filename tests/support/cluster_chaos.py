"""Clients that use a cluster while its parts are killed, stopped and cut off, and what must hold at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import httpx

from tests.support.cluster import CarrelProcess, ClusterProcesses, StoreProxy
from tests.support.server_process import descendants

SAMPLE = {"dataset": "demo", "sample_id": "calc-1"}
COUNT_LINES = {"command": "echo x >> lines; wc -l < lines"}
COUNT_RUNS = {"code": "n = globals().get('n', 0) + 1\nn"}
_UNFINISHED = ("creating", "pending", "running")
_PATIENCE = 60.0
"""Seconds for which a client repeats a request after the end."""


@dataclass
class Work:
    """What a client did in one session, as far as it was acknowledged."""

    session_id: str
    durable: bool = False
    lines: int = 0
    runs: int = 0
    tried: tuple[int, int] = (0, 0)
    """Lines and runs with what was requested and not answered."""
    saved: tuple[int, int] | None = None
    """Lines and runs at the last pause."""
    keys: Counter[str] = field(default_factory=Counter)
    """How many Idempotency-Keys were used, by kind."""
    operations: list[tuple[str, str]] = field(default_factory=list)
    """The paths of commands and verifications, each with what was answered."""
    is_closed: bool = False


@dataclass
class Tally:
    """What clients did, and what they were answered."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    creates: int = 0
    """How many Idempotency-Keys were used to create sessions."""


class SessionGone(Exception):
    """The session cannot be used any more."""


class NodeGone(SessionGone):
    """The node of the session is lost."""


class ChaosClient:
    """One client: it creates a session, works in it until it is closed or lost, and begins again."""

    def __init__(self, http: httpx.AsyncClient, urls: list[str], random: Random, tally: Tally, until: float) -> None:
        self._http, self._urls, self._random, self._tally, self._until = http, urls, random, tally, until

    async def work(self) -> None:
        while time.monotonic() < self._until:
            try:
                await self._one_session()
            except SessionGone as problem:
                self._tally.refused[f"gone: {problem}"] += 1

    async def _one_session(self) -> None:
        body: dict[str, Any] = self._random.choice([{}, SAMPLE, {"durable": True}])
        self._tally.creates += 1
        record = await self._post("/sessions", body, "create")
        work = Work(record["session_id"], durable="durable" in body)
        self._tally.work.append(work)
        actions = [self._count, self._count, self._run, self._fork]
        actions += [self._pause] if work.durable else [self._verify] if body else []
        while time.monotonic() < self._until and self._random.random() < 0.9:
            action = self._random.choice(actions)
            try:
                await action(work)
            except NodeGone:
                await self._continue_elsewhere(work)
        for _ in range(2 if work.durable else 1):  # A durable session is paused by the first one.
            closed = await self._request("DELETE", f"/sessions/{work.session_id}", None, {})
            work.is_closed = closed["message"] == "the session is closed"
        self._tally.done["close"] += 1

    async def _count(self, work: Work) -> None:
        # A command that was done twice would show a number too many.
        work.tried = (work.lines + 1, work.runs)
        done = await self._operation(work, "exec", COUNT_LINES)
        if done["status"] == "error":
            raise NodeGone(f"exec: {_plain(done['message'], work)}")
        work.lines += 1
        self._expect(work, "lines", int(done["stdout"] or -1), work.lines)

    async def _run(self, work: Work) -> None:
        work.tried = (work.lines, work.runs + 1)
        done = await self._post(f"/sessions/{work.session_id}/run", COUNT_RUNS, "run")
        work.runs += 1
        self._expect(work, "runs", done["value"], work.runs)

    async def _fork(self, work: Work) -> None:
        work.keys["fork"] += 1
        record = await self._post(f"/sessions/{work.session_id}/fork", {}, "fork")
        fork = Work(record["session_id"], lines=work.lines, runs=work.runs)
        self._tally.work.append(fork)
        await self._count(fork)
        await self._run(fork)
        closed = await self._request("DELETE", f"/sessions/{fork.session_id}", None, {})
        fork.is_closed = closed["message"] == "the session is closed"

    async def _verify(self, work: Work) -> None:
        job = await self._operation(work, "verify", {})
        if job["status"] == "error":
            raise NodeGone(f"verify: {_plain(job['error']['message'], work)}")
        self._expect(work, "verdict", job["result"]["is_success"], False)

    async def _pause(self, work: Work) -> None:
        record = await self._post(f"/sessions/{work.session_id}/pause", {}, "pause")
        self._expect(work, "lifecycle", record["lifecycle"], "paused")
        work.saved = (work.lines, work.runs)
        await self._resume(work)

    async def _resume(self, work: Work) -> None:
        """Open it again, and find what was there at its pause, or what was done since."""
        while True:
            record = await self._post(f"/sessions/{work.session_id}/resume", {}, "resume", is_lost=lambda _: False)
            if record["status"] == "ready":
                break
            # The process that had it open holds its lock for some seconds.
            self._tally.refused[f"resume: {_plain(str(record['error']), work)}"] += 1
            self._check_time()
            await asyncio.sleep(0.5)
        assert work.saved is not None
        lines, runs = work.saved
        try:
            done = await self._operation(work, "exec", COUNT_LINES)
            value = (await self._post(f"/sessions/{work.session_id}/run", COUNT_RUNS, "run"))["value"]
        except NodeGone:
            work.tried = (work.tried[0] + 1, work.tried[1] + 1)
            raise
        found = int(done["stdout"] or -1)
        if not (lines < found <= work.tried[0] + 1 and runs < value <= work.tried[1] + 1):
            self._wrong(work, f"{found} lines and {value} runs; {work.saved} were saved, {work.tried} done")
        work.lines, work.runs = found, value
        work.tried = (found, value)

    async def _continue_elsewhere(self, work: Work) -> None:
        if work.saved is None:
            raise SessionGone("node lost")
        while True:
            try:
                await self._resume(work)
            except NodeGone:
                continue
            self._tally.done["continue elsewhere"] += 1
            return

    def _expect(self, work: Work, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self._wrong(work, f"{what}: {found!r}, not {expected!r}")

    def _wrong(self, work: Work, what: str) -> None:
        self._tally.wrong.append(f"{work.session_id}: {what}")
        raise SessionGone("a wrong result")

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _operation(self, work: Work, kind: str, body: dict[str, Any]) -> Any:
        work.keys[kind] += 1
        path = f"/sessions/{work.session_id}/{kind}"
        answer = await self._post(path, body, kind)
        if kind == "exec":
            path = f"/sessions/{work.session_id}/interactions"
        name, seen = ("job_id", "status") if kind == "verify" else ("interaction_id", "stdout")
        if answer["status"] != "error":
            work.operations.append((f"{path}/{answer[name]}", answer[seen]))
        return answer

    async def _post(
        self, path: str, body: Any, kind: str, is_lost: Callable[[str], bool] = lambda code: code == "NodeLost"
    ) -> Any:
        """Repeat with the same key until there is an answer, and ask until it is final."""
        headers = {"Idempotency-Key": uuid4().hex, "Prefer": "wait=20"}
        answer = await self._request("POST", path, body, headers, is_lost)
        where = f"/sessions/{answer['session_id']}" if "session_id" in answer else ""
        if "interaction_id" in answer:
            where += f"/interactions/{answer['interaction_id']}"
        elif "job_id" in answer:
            where += f"/verify/{answer['job_id']}"
        while answer.get("status") in _UNFINISHED:
            answer = await self._request("GET", where, None, {"Prefer": "wait=20"}, is_lost)
        if kind in ("create", "fork") and answer["status"] != "ready":
            raise SessionGone(f"{kind}: {answer['status']} {(answer['error'] or {}).get('code')}")
        self._tally.done[kind] += 1
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        is_lost: Callable[[str], bool] = lambda code: code == "NodeLost",
    ) -> Any:
        """Repeat until there is an answer: at one gateway or the other."""
        while True:
            url = self._random.choice(self._urls)
            try:
                answer = await self._http.request(method, url + path, json=body, headers=headers)
            except httpx.TransportError as problem:
                self._tally.refused[type(problem).__name__] += 1
            else:
                if answer.status_code < 300:
                    return answer.json()
                code = answer.json().get("code", "") if answer.content else ""
                self._tally.refused[f"{answer.status_code} {code}"] += 1
                # Where all processes of a node are killed, it may see the end of a session's before its own.
                if is_lost(code) or "the session's Python ended" in answer.text:
                    raise NodeGone(code)
                if answer.status_code not in (429, 502, 503):
                    self._tally.wrong.append(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
                    raise SessionGone("a wrong answer")
            self._check_time()
            await asyncio.sleep(self._random.uniform(0.05, 0.5))

    def _check_time(self) -> None:
        if time.monotonic() > self._until + _PATIENCE:
            self._tally.wrong.append("a request had no answer until long after the end")
            raise SessionGone("the time is over")


def _plain(message: str, work: Work) -> str:
    return message.replace(work.session_id, "…")[:150]


# --- what breaks ----------------------------------------------------------------------------------------------------


async def disturb(
    processes: dict[str, CarrelProcess], proxies: dict[str, StoreProxy], random: Random, until: float
) -> list[str]:
    """Kill, stop and cut off random processes, one after the other, and bring each back; returns what was done."""
    done = []
    while time.monotonic() < until:
        await asyncio.sleep(random.uniform(0.5, 3))
        name = random.choice(sorted(processes))
        what = random.choice(["kill", "kill all", "stop shortly", "stop long", "cut", "reset", "delay"])
        done.append(f"{what} {name}")
        process, proxy = processes[name], proxies[name]
        if what == "kill":
            await asyncio.to_thread(_restart, process)
        elif what == "kill all":
            for pid in [process.pid, *(pid for pid, _ in descendants(process.pid))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(_restart, process)
        elif what in ("cut", "reset", "delay"):
            proxy.set({"cut": "swallow", "reset": "reset"}.get(what, "delay"))  # type: ignore[arg-type]
            await asyncio.sleep(random.uniform(0.5, 12))
            proxy.set("pass")
        elif not process.has_ended():
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(random.uniform(0.2, 1.5) if what == "stop shortly" else random.uniform(6, 12))
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        await asyncio.sleep(1)
        await restart_ended(processes)
    return done


async def restart_ended(processes: dict[str, CarrelProcess]) -> None:
    """Start the nodes again that have lost their lease, and ended."""
    for each in processes.values():
        if each.has_ended():
            await asyncio.to_thread(_restart, each)


def _restart(process: CarrelProcess) -> None:
    process.kill()
    process.start()


# --- what must hold at the end --------------------------------------------------------------------------------------


def left_running(cluster: ClusterProcesses) -> list[str]:
    """End everything, and return the processes that are still there, also those of nodes that were killed."""
    for process in [*cluster.gateways, *cluster.nodes.values()]:
        process.end()
    found = []
    for entry in Path("/proc").iterdir():
        # A sandbox has no path of the host in its environment, but its workspace is a mount from there.
        for name in ("environ", "cmdline", "mountinfo") if entry.name.isdigit() else ():
            with contextlib.suppress(OSError):
                if os.fsencode(cluster.folder) in (entry / name).read_bytes():
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:100]!r}")
                    break
    return found


async def check_acknowledged(http: httpx.AsyncClient, url: str, tally: Tally) -> None:
    """What was acknowledged is recorded as it was answered, and nothing was done more often than it was requested."""
    some = asyncio.Semaphore(16)

    async def get(path: str) -> Any:
        async with some:
            return (await http.get(url + path)).json()

    async def check(work: Work) -> None:
        record = await get(f"/sessions/{work.session_id}")
        if work.is_closed and record.get("status") != "closed":
            tally.wrong.append(f"{work.session_id}: it was closed, and now {str(record)[:300]}")
        elif "status" not in record:
            tally.wrong.append(f"{work.session_id}: it was created, and now {str(record)[:300]}")
        for path, seen in work.operations:
            found = await get(path)
            if found.get("status" if "/verify/" in path else "stdout") != seen:
                tally.wrong.append(f"{path}: acknowledged, and now {str(found)[:300]}")

    checks: list[Awaitable[None]] = [check(work) for work in tally.work]
    await asyncio.gather(*checks)
