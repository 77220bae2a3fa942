"""Limits of a server: sessions, times, sizes, executors started in advance, and samples that cannot be prepared."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import NewServer
from tests.support.server_process import ServerProcess, create_session, descendants, run_command, write_dataset


def ended(client: httpx.Client, session: str) -> dict[str, Any]:
    until = time.monotonic() + 60
    while (received := client.get(f"/sessions/{session}").json())["status"] in ("creating", "ready"):
        assert time.monotonic() < until, received
        time.sleep(0.02)
    return dict(received)


def test_the_maximum_number_of_sessions(new_server: NewServer) -> None:
    server = new_server("--max-sessions", 2)
    with server.client() as client:
        first = create_session(client)
        create_session(client)
        refused = client.post("/sessions", json={})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert "2 live sessions" in refused.json()["detail"]
        client.delete(f"/sessions/{first}")
        create_session(client)


def test_a_prewarmed_executor_is_as_fresh_as_any(new_server: NewServer) -> None:
    server = new_server("--prewarmed", 1)
    with server.client() as client:
        for number in range(4):
            session = create_session(client, dataset="demo", sample_id="calc-1")
            received = run_command(client, session, "ls; cat /tmp/mine")
            assert (received["stdout"], received["exit_code"]) == ("README.md\ncalc.py\ntests\n", 1)
            run_command(client, session, f"echo {number} > /tmp/mine; touch new; rm README.md")
            job = client.post(f"/sessions/{session}/verify", headers={"Prefer": "wait=55"}).json()
            assert job["result"]["suite_ran"]
            client.delete(f"/sessions/{session}")
        assert client.get("/metrics").text.count("carrel_sessions_alive 0.0") == 1


def test_a_prewarmed_executor_that_died_is_not_used(new_server: NewServer) -> None:
    server = new_server("--prewarmed", 1)

    def others() -> set[int]:
        return {pid for pid, _ in descendants(server.pid)}

    with server.client() as client:
        client.delete(f"/sessions/{create_session(client, dataset='demo', sample_id='calc-1')}")
        without = others()
        client.delete(f"/sessions/{create_session(client, dataset='demo', sample_id='calc-1')}")
        until = time.monotonic() + 60
        while not (kept := others() - without):
            assert time.monotonic() < until, "no executor was prewarmed for a sample that was requested twice"
            time.sleep(0.02)
        time.sleep(0.3)
        killed = others() - without | kept
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while killed & others():  # one that is dying cannot be distinguished from one that lives
            assert time.monotonic() < until, "what was killed is still there"
            time.sleep(0.02)
        session = create_session(client, dataset="demo", sample_id="calc-1")
        done = run_command(client, session, "cat calc.py | wc -l")
        assert done["exit_code"] == 0, done


def test_no_executor_is_prewarmed_for_samples_requested_once(new_server: NewServer) -> None:
    server = new_server()
    with server.client() as client:

        def settled(sample: str, least: int, most: int) -> int:
            """How many processes there are after a session, once there have been as many for a while."""
            client.delete(f"/sessions/{create_session(client, dataset='demo', sample_id=sample)}")
            seen = [0]
            until = time.monotonic() + 60
            while len(seen) < 25 or len(set(seen[-25:])) > 1 or not least <= seen[-1] <= most:
                assert time.monotonic() < until, seen[-25:]
                time.sleep(0.05)
                seen.append(len(descendants(server.pid)))
            return seen[-1]

        alone = settled("calc-1", 1, 1000)
        # The sandbox of the next session is prepared in advance for any sample, and discarded when something is
        # mounted on this machine: an init and a worker, or no process.
        ahead = 2
        settled("slug-1", alone, alone + ahead)
        settled("spans-1", alone, alone + ahead)
        kept = settled("spans-1", alone + 1, 1000)
        settled("tally-1", alone + 1, kept + ahead)


def test_nothing_of_a_closed_session_is_left(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client, dataset="demo", sample_id="calc-1")
    before = {pid for pid, _ in descendants(server.pid)}
    run_command(client, session, "setsid sleep 1000 & (trap '' TERM HUP; sleep 1000) & echo x > /tmp/left")
    more = {pid for pid, _ in descendants(server.pid)} - before
    assert len(more) >= 2
    assert client.delete(f"/sessions/{session}").status_code == 200
    until = time.monotonic() + 60
    while more & {pid for pid, _ in descendants(server.pid)}:
        assert time.monotonic() < until
        time.sleep(0.02)
    again = client.delete(f"/sessions/{session}")
    assert again.json()["message"] == "the session is closed"


def test_closed_while_its_command_runs(client: httpx.Client) -> None:
    session = create_session(client)
    begun = client.post(f"/sessions/{session}/exec", json={"command": "trap '' TERM INT; sleep 1000"}).json()
    other = client.post(f"/sessions/{session}/exec", json={"command": "sleep 1000"}).json()
    client.delete(f"/sessions/{session}")
    for each in (begun, other):
        received = client.get(f"/sessions/{session}/interactions/{each['interaction_id']}").json()
        assert received["exit_code"] == -1000
        assert "closed" in received["message"]


def test_the_time_of_a_session_can_be_changed(client: httpx.Client) -> None:
    session = create_session(client, ttl_minutes=1)
    before = client.get(f"/sessions/{session}").json()["expires_at"]
    changed = client.patch(f"/sessions/{session}", json={"ttl_minutes": 90}).json()
    assert changed["ttl_minutes"] == 90
    assert changed["expires_at"] > before
    client.delete(f"/sessions/{session}")
    assert client.patch(f"/sessions/{session}", json={"ttl_minutes": 90}).status_code == 409


def test_a_sandbox_that_dies_is_not_a_failed_command(client: httpx.Client) -> None:
    session = create_session(client)
    failed = run_command(client, session, "exit 7")
    assert (failed["exit_code"], failed["status"]) == (7, "completed")
    dead = run_command(client, session, "kill -9 -1; kill -9 $PPID; sleep 60", command_timeout=20)
    assert (dead["exit_code"], dead["status"]) == (-1000, "error")
    client.delete(f"/sessions/{session}")


def test_a_body_that_is_too_large(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client)
    large = b"x" * (65 * 1024 * 1024)
    received = client.put(f"/sessions/{session}/files/large", content=large)
    assert received.status_code == 413

    def pieces() -> Any:
        for _ in range(70):
            yield b"x" * 1024 * 1024

    # A body of unknown length, on a route that takes JSON, too. The server may hang up before all was sent.
    with suppress(httpx.TransportError):
        refused = client.post(
            f"/sessions/{session}/exec", content=pieces(), headers={"Content-Type": "application/json"}
        )
        assert (refused.status_code, refused.json()["code"]) == (413, "RequestRefused")
    with suppress(httpx.TransportError):
        assert client.put(f"/sessions/{session}/files/large", content=pieces()).status_code == 413
    assert client.get(f"/sessions/{session}/files").json()["entries"] == []
    client.delete(f"/sessions/{session}")


def test_the_errors_of_a_wrong_body_name_the_fields(client: httpx.Client) -> None:
    received = client.post("/sessions", json={"dataset": 5, "ttl_minutes": "soon"})
    assert received.status_code == 422
    assert {error["loc"][-1] for error in received.json()["detail"]} == {"dataset", "ttl_minutes"}
    assert client.post("/sessions", content=b"{", headers={"Content-Type": "application/json"}).status_code == 422
    form = client.post("/sessions", content=b"{}", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert (form.status_code, "send `Content-Type: application/json`" in form.text) == (422, True), "as curl sends it"
    half = client.post("/sessions", json={"dataset": "demo"})
    assert (half.status_code, "sample_id" in half.text) == (422, True)
    assert client.post("/sessions", json={"network": True}).status_code == 422, "this server gives none"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples that are each wrong in their own way."""
    folder = write_dataset(
        tmp_path_factory.mktemp("datasets") / "hostile",
        [
            {"sample_id": "hangs", "environment": {"setup": ["echo begun; sleep 600"], "setup_timeout": 0.5}},
            {"sample_id": "fails", "environment": {"setup": ["echo what went wrong; exit 3"]}},
            {"sample_id": "climbs", "files": "climbs.tar.gz"},
            {"sample_id": "links", "files": "links.tar.gz"},
            {"sample_id": "bomb", "files": "bomb.tar.gz"},
            {"sample_id": "none", "files": "none.tar.gz"},
            {"sample_id": "binary", "files": "fine", "test_patch": "\x00\x01 no patch", "verify": {"command": "true"}},
            {"sample_id": "empty", "files": "fine", "patch": "", "test_patch": "", "verify": {"command": "true"}},
            {"sample_id": "needs", "environment": {"programs": ["no-such-program"]}},
        ],
    )
    (folder / "fine").mkdir()
    (folder / "fine" / "a.txt").write_text("a\n")
    _archive(folder / "climbs.tar.gz", "../../climbed", b"x")
    _archive(folder / "links.tar.gz", "link", b"", to="/etc/passwd")
    _archive(folder / "bomb.tar.gz", "zeros", b"\0" * (400 * 1024 * 1024))
    return folder.parent


def _archive(path: Path, name: str, content: bytes, to: str = "") -> None:
    with tarfile.open(path, "w:gz", compresslevel=9) as archive:
        entry = tarfile.TarInfo(name)
        if to:
            entry.type, entry.linkname = tarfile.SYMTYPE, to
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def test_samples_that_cannot_be_prepared(new_server: NewServer, hostile: Path) -> None:
    """Each becomes a session with an error that says why, and the server works on."""
    server = new_server("--datasets", hostile)
    wanted = {
        "hangs": ("setup_failed", "took too long"),
        "fails": ("setup_failed", "what went wrong"),
        "climbs": ("files_refused", "climbed"),
        "links": ("files_refused", "link"),
        "bomb": ("files_refused", "bomb"),
        "none": ("files_refused", "none.tar.gz"),
        "needs": ("environment_failed", "no-such-program"),
    }
    with server.client() as client:
        for sample, (code, words) in wanted.items():
            made = client.post("/sessions", json={"dataset": "hostile", "sample_id": sample}).json()
            received = ended(client, made["session_id"])
            assert (received["status"], received["error"]["code"]) == ("error", code), received
            assert words in received["error"]["message"]
            assert str(hostile) not in received["error"]["message"], "the folder is not the users' business"
            assert client.post(f"/sessions/{made['session_id']}/exec", json={"command": "ls"}).status_code == 409
        assert client.get("/health").status_code == 200
        binary = create_session(client, dataset="hostile", sample_id="binary")
        job = client.post(f"/sessions/{binary}/verify", headers={"Prefer": "wait=55"}).json()
        assert (job["status"], job["error"]["code"]) == ("error", "infrastructure_failed")
        assert "test_patch" in job["error"]["message"]
        empty = create_session(client, dataset="hostile", sample_id="empty")
        job = client.post(f"/sessions/{empty}/verify", headers={"Prefer": "wait=55"}).json()
        assert (job["status"], job["result"]["is_success"]) == ("completed", True)
        download = client.get("/samples/hostile/climbs/download")
        assert (download.status_code, str(hostile) in download.text) == (409, False), download.text
        write_dataset(hostile / "unfit", [{"sample_id": "a", "fail_to_pas": []}])
        unfit = client.post("/sessions", json={"dataset": "unfit", "sample_id": "a"})
        assert (unfit.status_code, unfit.json()["code"]) == (409, "DatasetInvalid")
        assert unfit.json()["detail"].startswith("unfit/samples.jsonl, line 1 (a): there is no field 'fail_to_pas'")
    assert not list(Path(hostile).rglob("climbed"))


def test_the_complete_output_of_a_verification(new_server: NewServer, tmp_path: Path) -> None:
    loud = {"sample_id": "loud", "verify": {"command": "seq 200000; echo warning >&2; exit 1", "retries": 1}}
    folder = write_dataset(tmp_path / "datasets" / "small", [loud]).parent
    server = new_server("--datasets", folder)
    with server.client() as client:
        session = create_session(client, dataset="small", sample_id="loud")
        job = client.post(f"/sessions/{session}/verify", headers={"Prefer": "wait=55"}).json()
        whole = "".join(f"{number}\n" for number in range(1, 200001))
        assert len(job["result"]["stdout"]) < len(whole)
        at = f"/sessions/{session}/verify/{job['job_id']}/output"
        assert client.get(at).text == whole
        assert client.get(f"{at}?stream=stderr&attempt=1").text == "warning\n"
        assert client.get(f"{at}?attempt=3").status_code == 404
        client.delete(f"/sessions/{session}")
        assert client.get(at).text == whole


def test_names_that_no_file_can_have(client: httpx.Client) -> None:
    session = create_session(client)
    for path in ("%00", "a%00b/", "a" * 5000):
        assert client.get(f"/sessions/{session}/files/{path}").status_code in (404, 409, 422)
        assert client.put(f"/sessions/{session}/files/{path}", content=b"").status_code in (404, 409, 422)
    odd = run_command(client, session, "true \x00")
    assert (odd["exit_code"], odd["success"]) == (-1000, False)
    half = client.post(
        f"/sessions/{session}/exec", content=rb'{"command": "\ud800"}', headers={"Content-Type": "application/json"}
    )
    assert half.status_code == 422
    made = client.post("/sessions", json={"files": {"/proc/x": ""}}, headers={"Prefer": "wait=55"}).json()
    assert made["status"] == "error"
    assert made["error"]["code"].endswith("_error")
    assert "o_s_" not in made["error"]["code"]
    client.delete(f"/sessions/{session}")


@pytest.mark.parametrize(
    ("route", "body", "meant"),
    [
        ("/sessions", {"ttl_minute": 5}, "ttl_minutes"),
        ("/sessions/a/exec", {"command": "ls", "comand_timeout": 1}, "command_timeout"),
        ("/sessions/a/run", {"code": "1", "timeot": 1}, "timeout"),
        ("/sessions/a/fork", {"ttl-minutes": 1}, "ttl_minutes"),
    ],
)
def test_a_misspelled_field_is_refused(client: httpx.Client, route: str, body: dict[str, Any], meant: str) -> None:
    answer = client.post(route, json=body)
    assert answer.status_code == 422, answer.text
    assert f"did you mean '{meant}'" in answer.json()["detail"][0]["msg"]


def test_an_unknown_field_is_ignored(client: httpx.Client) -> None:
    session = create_session(client, session_name="mine", priority=3)
    assert run_command(client, session, "echo x", interactive=False)["stdout"] == "x\n"
