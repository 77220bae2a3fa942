"""`carrel serve` and `carrel keys` on the command line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.cli.conftest import Carrel, carrel, environment, home
from tests.server.conftest import NewServer

__all__ = ["carrel", "environment", "home"]


def test_a_key_is_printed_alone_and_once(carrel: Carrel, tmp_path: Path) -> None:
    key = carrel("keys", "add", "ann", "--data", tmp_path / "data").stdout
    assert key.count("\n") == 1
    assert len(key.split()) == 1
    listed = carrel("keys", "list", "--data", tmp_path / "data").stdout
    assert "ann" in listed
    assert key.strip() not in listed
    again = carrel("keys", "add", "ann", "--data", tmp_path / "data", code=2)
    assert "already" in again.stderr
    assert "not a valid name" in carrel("keys", "add", "a/b", "--data", tmp_path / "data", code=2).stderr
    carrel("keys", "revoke", "ann", "--data", tmp_path / "data")
    assert json.loads(carrel("keys", "list", "--data", tmp_path / "data", "--json").stdout) == []
    assert "ann" in carrel("keys", "revoke", "ann", "--data", tmp_path / "data", code=2).stderr


def test_without_a_key_only_loopback_is_listened_on(carrel: Carrel, tmp_path: Path) -> None:
    refused = carrel("serve", "--host", "0.0.0.0", "--port", 0, "--data", tmp_path / "data", code=2)
    assert "carrel keys add" in refused.stderr


def test_a_port_that_is_taken(carrel: Carrel, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in carrel("serve", "--port", port, "--data", tmp_path / "data", code=3).stderr
    kept = carrel("keys", "list", "--data", tmp_path / "data", "--json").stdout
    assert json.loads(kept) == [], "a key that was not shown is of no use"


def test_a_second_ctrl_c_ends_it_without_a_traceback(environment: dict[str, str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "carrel", "serve", "--port", "0", "--json", "--data", str(tmp_path / "data")]
    with (tmp_path / "err").open("w") as errors:
        server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert server.stdout is not None
        printed = json.loads(server.stdout.readline())
        headers = {"Authorization": f"Bearer {printed['key']}"}
        with httpx.Client(base_url=printed["url"], headers=headers, timeout=60) as client:
            session = client.post("/sessions", json={}, headers={"Prefer": "wait=50"}).json()["session_id"]
            with client.stream("GET", f"/sessions/{session}/events"):
                server.send_signal(signal.SIGINT)
                time.sleep(0.1)
                server.send_signal(signal.SIGINT)
                assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    assert (tmp_path / "err").read_text() == ""


def test_what_cannot_be_served(carrel: Carrel, tmp_path: Path) -> None:
    assert "maybe" in carrel("serve", "--sandbox", "maybe", "--data", tmp_path / "data", code=2).stderr
    assert "nowhere" in carrel("serve", "--host", "nowhere.invalid", "--data", tmp_path / "data", code=2).stderr


def test_a_key_is_made_once(new_server: NewServer) -> None:
    server = new_server()
    first = server.key
    assert first
    server.stop()
    server.start()
    assert server.key == first, "the second start made none"
    with server.client() as client:
        assert client.get("/sessions").status_code == 200


def test_keys_in_another_folder(carrel: Carrel, new_server: NewServer, tmp_path: Path) -> None:
    key = carrel("keys", "add", "ann", "--data", tmp_path / "keys").stdout.strip()
    server = new_server("--keys", tmp_path / "keys")
    assert not server.key, "there is one, so none was made"
    with server.client(key) as client:
        assert client.get("/sessions").status_code == 200
