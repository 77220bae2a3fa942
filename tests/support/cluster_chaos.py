"""Clients that use a cluster while its parts are killed, stopped and cut off, and what must hold at the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import uuid4

import httpx

from tests.support.cluster import CarrelProcess, ClusterProcesses, StoreProxy
from tests.support.server_process import descendants, is_alive

SAMPLE = {"dataset": "demo", "sample_id": "calc-1"}
_LOST = ("NodeLost", "SessionNotReady", "SessionNotFound")


@dataclass
class Tally:
    """What clients did, and what they were answered."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    commands: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """By session: the ids of commands that were acknowledged, with their output."""


class ChaosClient:
    """One client: it creates a session, works in it until it is closed or lost, and begins again."""

    def __init__(self, http: httpx.AsyncClient, urls: list[str], random: Random, tally: Tally) -> None:
        self._http, self._urls, self._random, self._tally = http, urls, random, tally

    async def work(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self._one_session(until)
            except SessionGone as problem:
                self._tally.refused[str(problem)] += 1

    async def _one_session(self, until: float) -> None:
        body = SAMPLE if self._random.random() < 0.5 else {}
        session = await self._post("/sessions", body, until)
        session_id, number, lines = session["session_id"], 0, 0
        self._tally.done["create"] += 1
        while time.monotonic() < until and self._random.random() < 0.9:
            number += 1
            action = self._random.choice(["exec", "exec", "exec", "run", "fork", "verify" if body else "exec"])
            if action == "exec":
                # A command that was done twice would show a number too many.
                lines += 1
                done = await self._post(
                    f"/sessions/{session_id}/exec", {"command": "echo x >> lines; wc -l < lines"}, until
                )
                if done["exit_code"] != 0:
                    raise SessionGone("a command was interrupted")
                if int(done["stdout"]) != lines:
                    self._tally.wrong.append(f"{session_id}: {done['stdout'].strip()} lines after {lines} commands")
                self._tally.commands.setdefault(session_id, []).append((done["interaction_id"], done["stdout"]))
            elif action == "run":
                done = await self._post(f"/sessions/{session_id}/run", {"code": "n = globals().get('n', 0) + 1"}, until)
            elif action == "fork":
                fork = await self._post(f"/sessions/{session_id}/fork", {}, until)
                await self._request("DELETE", f"/sessions/{fork['session_id']}", None, {}, until)
            else:
                await self._post(f"/sessions/{session_id}/verify", {}, until)
            self._tally.done[action] += 1
        await self._request("DELETE", f"/sessions/{session_id}", None, {}, until)
        self._tally.done["close"] += 1

    async def _post(self, path: str, body: dict[str, Any], until: float) -> Any:
        headers = {"Idempotency-Key": uuid4().hex, "Prefer": "wait=20"}
        answer = await self._request("POST", path, body, headers, until)
        if answer.get("status") in ("creating", "pending", "running", "starting"):
            answer = await self._wait(path, answer, until)
        if answer.get("status") in ("error", "terminated") and "exit_code" not in answer:
            raise SessionGone(f"{path.rpartition('/')[2]}: {answer['status']}")
        return answer

    async def _wait(self, path: str, answer: dict[str, Any], until: float) -> Any:
        session = answer["session_id"]
        where = f"/sessions/{session}"
        if "interaction_id" in answer:
            where += f"/interactions/{answer['interaction_id']}"
        elif "job_id" in answer:
            where += f"/verify/{answer['job_id']}"
        while answer.get("status") in ("creating", "pending", "running", "starting"):
            answer = await self._request("GET", where, None, {"Prefer": "wait=20"}, until)
        return answer

    async def _request(self, method: str, path: str, body: Any, headers: dict[str, str], until: float) -> Any:
        """Repeat with the same key until there is an answer: at one gateway or the other."""
        while True:
            url = self._random.choice(self._urls)
            try:
                answer = await self._http.request(method, url + path, json=body, headers=headers)
            except httpx.TransportError:
                self._tally.refused["connection"] += 1
            else:
                if answer.status_code < 300:
                    return answer.json()
                code = answer.json().get("code", "") if answer.content else ""
                self._tally.refused[f"{answer.status_code} {code}"] += 1
                if code in _LOST:
                    raise SessionGone(code)
                if answer.status_code not in (429, 502, 503):
                    self._tally.wrong.append(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
                    raise SessionGone("a wrong answer")
            if time.monotonic() > until + 30:
                raise SessionGone("the time is over")
            await asyncio.sleep(self._random.uniform(0.05, 0.5))


class SessionGone(Exception):
    """The session cannot be used any more."""


async def disturb(cluster: ClusterProcesses, proxies: dict[str, StoreProxy], random: Random, until: float) -> list[str]:
    """Kill, stop and cut off random parts, one after the other, and bring each back; returns what was done."""
    done = []
    while time.monotonic() < until:
        await asyncio.sleep(random.uniform(1, 4))
        name = random.choice(sorted(cluster.nodes))
        what = random.choice(["kill", "stop shortly", "stop long", "cut", "reset", "gateway"])
        done.append(f"{what} {name}")
        node = cluster.nodes[name]
        if what == "gateway":
            await asyncio.to_thread(_restart, random.choice(cluster.gateways))
        elif what == "kill":
            await asyncio.to_thread(_restart, node)
        elif what in ("cut", "reset"):
            proxies[name].set("swallow" if what == "cut" else "reset")
            await asyncio.sleep(random.uniform(0.5, 12))
            proxies[name].set("pass")
        elif not node.has_ended():
            node.send_signal(signal.SIGSTOP)
            await asyncio.sleep(random.uniform(0.2, 1.5) if what == "stop shortly" else random.uniform(6, 12))
            with contextlib.suppress(ProcessLookupError):
                node.send_signal(signal.SIGCONT)
        await asyncio.sleep(1)
        for each in cluster.nodes.values():
            if each.has_ended():  # it had lost its lease
                await asyncio.to_thread(_restart, each)
    return done


def _restart(process: CarrelProcess) -> None:
    process.kill()
    process.start()


def left_running(cluster: ClusterProcesses) -> list[tuple[int, str]]:
    """End everything, and return the processes that are still there."""
    processes = [*cluster.nodes.values(), *cluster.gateways]
    family = [each for process in processes if not process.has_ended() for each in descendants(process.pid)]
    for process in processes:
        process.end()
    return [each for each in family if is_alive(each)]


def check_acknowledged(client: httpx.Client, tally: Tally) -> None:
    """Each command that was acknowledged is recorded with the output that was seen."""
    for session_id, commands in tally.commands.items():
        for interaction_id, output in commands:
            found = client.get(f"/sessions/{session_id}/interactions/{interaction_id}")
            if found.status_code != 200 or found.json()["stdout"] != output:
                tally.wrong.append(f"{session_id}/{interaction_id}: acknowledged, and now {found.text[:200]}")
