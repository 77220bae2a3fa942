"""Both clients on a real server: everything that a session can do."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import io
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from carrel import tasks
from carrel.client import AsyncClient, AsyncRemoteSession, Client, RemoteSession
from carrel.errors import (
    CarrelError,
    CommandNotRun,
    ConfigurationError,
    ForkRefused,
    KeyNotAccepted,
    NotFoundThere,
    RemoteError,
    RequestRefused,
    ServerUnreachable,
    SessionNotReady,
    WaitedTooLong,
)
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.wire.answers import Interaction, OutputPiece, RunResult
from carrel.wire.verification import Job
from tests.client.conftest import all_of, got
from tests.support.server_process import ServerProcess


def test_both_clients_have_the_same_calls() -> None:
    def calls(group: object) -> dict[str, str]:
        kind = group if isinstance(group, type) else type(group)
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: ", ".join(inspect.signature(call).parameters) for name, call in members if name[0] != "_"}

    blocks, waits = Client(api_key="k"), AsyncClient(api_key="k")
    groups = ("health", "datasets", "samples", "sessions", "approvals")
    for group in groups:
        assert calls(getattr(waits, group)) == calls(getattr(blocks, group))
    assert calls(waits.sessions.verify) == calls(blocks.sessions.verify)
    assert calls(RemoteSession) == calls(AsyncRemoteSession)


def test_the_synchronous_client_is_generated_from_the_asynchronous_one(tmp_path: Path) -> None:
    top = Path(__file__).parents[2]
    script = [sys.executable, "scripts/generate-sync", "--check"]
    assert subprocess.run(script, cwd=top, check=False).returncode == 0
    copy = tmp_path / "copy"
    for part in ("scripts/generate-sync", "pyproject.toml", "src/carrel/client", "src/carrel/session"):
        target = copy / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (top / part).is_dir() else shutil.copy)(top / part, target)
    (copy / ".venv").symlink_to(top / ".venv")
    module = copy / "src/carrel/client/_async/client.py"
    module.write_text(module.read_text() + "\nNEW = 1\n")
    stale = subprocess.run(script, cwd=copy, check=False, capture_output=True, text=True)
    assert stale.returncode == 1
    assert "_sync/client.py; run `make generate`" in stale.stderr


VALUES = r"""
import datetime, decimal, pathlib, uuid
[None, True, 2**80, float("inf"), 1.5, 2j,
 "caf\u00e9", b"\0\xff", [1, [2]], (1, (2,)), {1: "a", (2, 3): b"b"}, {"a": {1, 2}},
 frozenset({3}), datetime.datetime(2026, 1, 5, 10, 30, fold=1), datetime.date(2026, 1, 5), datetime.time(10, 30),
 datetime.timedelta(1, 2, 3), decimal.Decimal("1.10"), uuid.UUID(int=5), pathlib.Path("/a/b"), object]
"""


async def test_values_are_those_of_a_local_session(client: Any) -> None:
    session = await got(client.sessions.create())
    far = await got(session.run(VALUES))
    await got(session.close())
    async with SubprocessExecutor() as near:
        here = (await near.run(VALUES)).value
    assert here is not None
    assert far.value == here
    assert [type(value) for value in far.value[:-1]] == [type(value) for value in here[:-1]]
    assert far.value[-1] == "<class 'object'>"


def test_an_invalid_encoded_value_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of value"):
        RunResult.model_validate({"packed": {"$": "code", "of": "1 + 1"}})


async def test_health_datasets_and_samples(client: Any) -> None:
    assert (await got(client.health.check())).service == "carrel"
    assert [dataset.name for dataset in await got(client.datasets.list())] == ["demo"]
    page = await got(client.samples.list(dataset="demo", page=2, page_size=2))
    assert (len(page.samples), page.page, page.has_more) == (2, 2, True)
    each = await all_of(client.samples.each(dataset="demo"))
    assert len(each) == page.total_count
    assert each[2:4] == page.samples
    assert (await got(client.samples.list(search="CALC"))).samples[0].fail_to_pass


async def test_downloading_the_files_of_a_sample(client: Any, tmp_path: Path) -> None:
    archive = await got(client.samples.download("calc-1", dataset="demo"))
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        assert any(name.endswith("calc.py") for name in files.getnames())
    heard: list[int] = []
    path = await got(
        client.samples.download_to(
            tmp_path / "x.tar.gz", "calc-1", dataset="demo", on_progress=lambda done, size: heard.append(done)
        )
    )
    assert gzip.decompress(path.read_bytes()) == gzip.decompress(archive)
    assert heard[-1] == path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]


async def test_create_execute_verify_close(client: Any) -> None:
    session = await got(client.sessions.create(dataset="demo", sample_id="calc-1", ttl_minutes=5))
    assert session.status == "ready"
    listed = await got(client.sessions.execute_command(session_id=session.session_id, command="ls -l"))
    assert "calc.py" in listed.stdout
    assert listed.success
    job = await got(client.sessions.verify.start(session_id=session.session_id))
    status = await got(client.sessions.verify.status(job_id=job.job_id, session_id=session.session_id))
    assert (status.status, status.result.is_success, status.result.outcome) == ("completed", False, "not_solved")
    assert status.result.failures[0].name
    sample = (await got(client.samples.list(dataset="demo", search="calc-1"))).samples[0]
    await got(session.write_file("fix.patch", sample.patch))
    assert (await got(session.execute_command("git apply fix.patch && rm fix.patch"))).exit_code == 0
    job = await got(session.verify())
    assert (job.result.is_success, job.result.score, job.result.outcome) == (True, 1.0, "solved")
    assert (job.result.integrity, job.result.evidence) == ("clean", [])
    closed = await got(client.sessions.close(session_id=session.session_id))
    assert closed.duration_seconds > 0
    assert (await got(client.sessions.retrieve(session.session_id))).status == "closed"
    with pytest.raises(SessionNotReady, match="closed"):
        await got(session.execute_command("ls"))


async def test_commands(session: Any) -> None:
    done = await got(
        session.execute_command("cat; echo $A; pwd; echo no >&2; exit 3", stdin="in\n", env={"A": "1"}, cwd="/tmp")
    )
    assert (done.stdout, done.stderr, done.exit_code, done.success) == ("in\n1\n/tmp\n", "no\n", 3, False)
    late = await got(session.execute_command("echo soon; sleep 60", timeout=2))
    assert (late.timed_out, late.success, late.stdout) == (True, False, "soon\n")
    behind = await got(session.execute_command("sleep 60 & echo started"))
    assert behind.stdout == "started\n"


async def test_a_command_longer_than_a_held_answer(client: Any, session: Any) -> None:
    wait_for_go = "until [ -e go ]; do sleep 0.05; done; echo end"
    begun = await got(
        client.sessions.execute_command(session.session_id, command=wait_for_go, wait_for_completion=False)
    )
    assert not begun.is_finished
    with pytest.raises(WaitedTooLong):
        await got(client.sessions.execute_command(session.session_id, command="sleep 600", timeout=0.3))
    # Commands run side by side.
    assert (await got(client.sessions.execute_command(session.session_id, command="touch go"))).success
    while not (ended := await got(session.get_interaction(begun.interaction_id))).is_finished:
        pass
    assert ended.stdout == "end\n"


async def test_background_commands(session: Any) -> None:
    begun = await got(session.execute_command("sleep 0.3; echo done", background=True))
    assert begun.pid > 0
    for _ in range(600):
        ended = await got(session.execute_command(f"cat {begun.output}.exit"))
        if ended.success:
            break
        await asyncio.sleep(0.1)
    assert ended.stdout == "0\n"
    assert await got(session.read_file(begun.output)) == b"done\n"


async def test_output_is_streamed(server: ServerProcess, session: Any) -> None:
    came: list[str] = []
    done = await got(
        session.execute_command(
            "echo one; sleep 0.2; echo two >&2; exit 4",
            on_output=lambda piece: came.append(f"{piece.stream} {piece.text}"),
        )
    )
    assert (done.exit_code, done.stdout, done.stderr) == (4, "one\n", "two\n")
    assert sorted(came) == ["stderr two\n", "stdout one\n"]
    pieces = await all_of(session.stream_command("echo x"))
    assert isinstance(pieces[0], OutputPiece)
    assert isinstance(pieces[-1], Interaction)

    def close(piece: OutputPiece) -> None:
        came.append(piece.text)
        with Client(base_url=server.url, api_key=server.key) as other:
            other.sessions.close(session.session_id)

    # It would go on for minutes; it ends because its first line was heard while it ran.
    with pytest.raises(CommandNotRun, match="closed"):
        await got(session.execute_command("echo three; sleep 300", on_output=close))
    assert came[2:] == ["three\n"]


async def test_five_megabytes_of_output(session: Any) -> None:
    big = "yes 0123456789abcde | head -c 5000000"
    assert len((await got(session.execute_command(big))).stdout) == 5_000_000
    pieces = await all_of(session.stream_command(big))
    assert len(pieces[-1].stdout) == 5_000_000
    result = await got(session.run("print('x' * 5_000_000)"))
    assert len(result.stdout) == 5_000_001


async def test_run_code(session: Any) -> None:
    result = await got(session.run("x = 20\nprint('hi')\nx + 1"))
    assert (result.value, result.value_repr, result.stdout, result.is_ok) == (21, "21", "hi\n", True)
    result = await got(session.run("{1: (x, b'y')}"))
    assert (result.value, result.value_repr) == ({1: (20, b"y")}, "{1: (20, b'y')}")
    assert "packed" not in result.model_dump()
    failed = await got(session.run("1 / 0"))
    assert (failed.error_type, failed.is_ok) == ("ZeroDivisionError", False)
    late = await got(session.run("while True: pass", timeout=0.5))
    assert (late.error_type, late.state) == ("Timeout", "kept")
    pieces = await all_of(session.stream("for n in range(3): print(n)\nx"))
    assert "".join(piece.text for piece in pieces[:-1]) == "0\n1\n2\n"
    assert isinstance(pieces[-1], RunResult)
    assert pieces[-1].value == 20


async def test_leaving_a_stream_stops_the_code(session: Any) -> None:
    stream = session.stream("import time\nx = 'kept'\nprint('begun', flush=True)\ntime.sleep(100)")
    if hasattr(stream, "__aiter__"):
        assert (await anext(stream)).text == "begun\n"
        await stream.aclose()
    else:
        assert next(stream).text == "begun\n"
        stream.close()
    assert (await got(session.run("x"))).value == "kept"


async def test_interrupt_from_elsewhere(server: ServerProcess, session: Any) -> None:
    """The client that blocks is blocked by its own run, so another one interrupts."""
    over = threading.Event()
    heard: list[bool] = []

    def interrupt() -> None:
        with Client(base_url=server.url, api_key=server.key) as other:
            while not over.wait(0.2):
                heard.append(other.sessions.interrupt(session.session_id))

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = await got(session.run("import time\ntime.sleep(100)", timeout=60))
    over.set()
    await asyncio.to_thread(thread.join)
    assert result.error_type == "KeyboardInterrupt"
    assert any(heard)
    assert (await got(session.run("6 * 7"))).value == 42


async def test_files(session: Any, tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192
    here = tmp_path / "here"
    here.write_bytes(data)
    await got(session.write_file("a b/ü?#%.bin", here))
    await got(session.write_file("note.txt", "grüß dich"))
    await got(session.write_file("empty.json", b""))
    await got(session.write_file("data.json", b'{"entries": []}'))
    assert await got(session.read_file("a b/ü?#%.bin")) == data
    assert await got(session.download_file("a b/ü?#%.bin", tmp_path / "back")) == tmp_path / "back"
    assert (tmp_path / "back").read_bytes() == data
    assert await got(session.read_file("note.txt")) == "grüß dich".encode()
    assert await got(session.read_file("empty.json")) == b""
    assert await got(session.read_file("data.json")) == b'{"entries": []}'
    assert await got(session.read_file("/etc/hostname"))
    assert {"name": "a b", "kind": "folder"}.items() <= next(
        entry for entry in await got(session.list_files()) if entry.name == "a b"
    ).model_dump().items()
    assert [entry.name for entry in await got(session.list_files("a b"))] == ["ü?#%.bin"]
    changed = {change.path: change.kind for change in await got(session.changed_files())}
    assert changed["note.txt"] == "added"
    assert "+grüß dich" in await got(session.diff())


async def test_errors_of_files_are_those_of_open(session: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await got(session.read_file("nowhere"))
    with pytest.raises(FileNotFoundError):
        await got(session.read_file("../../nowhere"))
    with pytest.raises(FileNotFoundError):
        await got(session.list_files("nowhere"))
    with pytest.raises(IsADirectoryError):
        await got(session.read_file("tests"))
    with pytest.raises(IsADirectoryError):
        await got(session.download_file("tests", tmp_path / "x"))
    with pytest.raises(NotADirectoryError):
        await got(session.list_files("calc.py"))
    with pytest.raises((IsADirectoryError, RemoteError)):
        await got(session.write_file("tests", b""))
    assert list(tmp_path.iterdir()) == []


async def test_str_replace(session: Any) -> None:
    await got(session.write_file("t", "one two two"))
    await got(session.str_replace("t", "one", "1"))
    assert await got(session.read_file("t")) == b"1 two two"
    with pytest.raises(ValueError, match="2"):
        await got(session.str_replace("t", "two", "2"))


async def test_fork(session: Any) -> None:
    await got(session.run("x = 1"))
    await got(session.write_file("f", "one"))
    branch = await got(session.fork())
    assert branch.session_id != session.session_id
    await got(branch.run("x = 2"))
    await got(branch.write_file("f", "two"))
    assert (await got(session.run("x"))).value == 1
    assert (await got(branch.run("x"))).value == 2
    assert await got(session.read_file("f")) == b"one"
    await got(branch.close())
    assert (await got(session.run("x"))).value == 1


async def test_checkpoint_and_rewind(session: Any) -> None:
    await got(session.run("x = 1"))
    await got(session.write_file("f", "one"))
    point = await got(session.checkpoint("good"))
    for to in (point, "good", point.id):
        await got(session.run("x = 2"))
        await got(session.write_file("f", "two"))
        assert await got(session.rewind(to)) == point
        assert (await got(session.run("x"))).value == 1
        assert await got(session.read_file("f")) == b"one"
    assert await got(session.checkpoints()) == [point]
    await got(session.drop_checkpoint(point))
    assert await got(session.checkpoints()) == []
    with pytest.raises(ForkRefused, match="no checkpoint good"):
        await got(session.rewind("good"))


async def test_conversation_events_and_trace(session: Any) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "please"}]}
    assert await got(session.add_messages(message, message)) == 2
    assert [message["role"] for message in (await got(session.conversation()))["messages"]] == ["user", "user"]
    page = await got(session.conversation(before=2, limit=5))
    assert (len(page["messages"]), page["first"], page["has_more"]) == (1, 1, False)
    await got(session.execute_command("echo hello"))
    so_far = await all_of(session.events(follow=False))
    assert {"session", "interaction"} <= {event.kind for event in so_far}
    assert [event.seq for event in so_far] == sorted({event.seq for event in so_far})
    await got(session.close())
    whole = await all_of(session.events())
    assert whole[: len(so_far)] == so_far
    assert await all_of(session.events(from_seq=so_far[-1].seq + 1)) == whole[len(so_far) :]


async def test_time_to_live(session: Any) -> None:
    assert (await got(session.extend(120))).expires_at > session.expires_at
    assert (await got(session.refresh())).expires_at > session.expires_at
    with pytest.raises(RequestRefused, match="ttl_minutes"):
        await got(session.extend(0))


async def test_listed_sessions_have_the_calls_of_a_session(client: Any, session: Any) -> None:
    found = await got(client.sessions.list())
    mine = next(each for each in found.sessions if each.session_id == session.session_id)
    assert type(mine) is type(session)
    assert (await got(mine.execute_command("echo hi"))).stdout == "hi\n"


async def test_cancelling_a_verification(client: Any, session: Any) -> None:
    job = await got(session.verify(wait_for_completion=False))
    ended = await got(client.sessions.verify.cancel(job.job_id, session_id=session.session_id))
    assert ended.status in ("cancelled", "completed")
    assert (await got(session.execute_command("true"))).success


def test_with_closes_a_session(blocking_client: Client) -> None:
    with blocking_client.sessions.create() as session:
        assert session.dataset == ""
        assert session.run("1 + 1").value == 2
        assert session.execute_command("ls").stdout == ""
    assert session.refresh().status == "closed"
    assert session.close() is not None
    with pytest.raises(KeyError), blocking_client.sessions.create() as session:
        raise KeyError("the error of the caller's own")
    assert session.refresh().status == "closed"


async def test_async_with_closes_a_session(async_client: AsyncClient) -> None:
    async with await async_client.sessions.create() as session:
        assert (await session.run("1 + 1")).value == 2
    assert (await session.refresh()).status == "closed"


async def test_cancelling_a_call_leaves_command_and_client_usable(async_client: AsyncClient) -> None:
    async with await async_client.sessions.create() as session:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.execute_command("until [ -e go ]; do sleep 0.05; done; echo x > f"), 1)
        await session.execute_command("touch go")
        assert (await session.execute_command("until [ -s f ]; do sleep 0.05; done; cat f")).stdout == "x\n"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run("y = 1\nimport time\ntime.sleep(100)"), 2)
        assert (await session.run("y")).value == 1


WRONG_NAMES = [
    (lambda client: client.sessions.create(ttl_minute=5), "create.*'ttl_minute'; did you mean 'ttl_minutes'"),
    (lambda client: client.sessions.create(nonsense=1), "create.*'nonsense'; it has dataset, .*poll_interval"),
    (
        lambda client: client.sessions.execute_command("a", command="ls", command_timeot=1),
        "execute_command.*'command_timeot'; did you mean 'command_timeout'",
    ),
    (lambda client: client.sessions.retrieve("a", poll_interval=1), "retrieve.*'poll_interval'; it has session_id"),
    (lambda client: client.sessions.stream("a", code="1", timout=1), "stream.*'timout'; did you mean 'timeout'"),
    (lambda client: client.sessions.verify.start("a", wait_for_complete=1), "start.*'wait_for_completion'"),
    (lambda client: client.samples.each(datset="demo"), "each.*'dataset'"),
]


@pytest.mark.parametrize(("call", "reason"), WRONG_NAMES)
async def test_an_unknown_option_is_refused(client: Any, call: Any, reason: str) -> None:
    async def send() -> None:
        answer = call(client)
        await (all_of(answer) if hasattr(answer, "__next__") or hasattr(answer, "__anext__") else got(answer))

    with pytest.raises(TypeError, match=reason):
        await send()


@pytest.mark.parametrize("wrong", [-1, float("nan"), "5", True])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("timeout", lambda client, it: client.sessions.retrieve("a", timeout=it)),
        ("poll_interval", lambda client, it: client.sessions.create(poll_interval=it)),
        ("command_timeout", lambda client, it: client.sessions.execute_command("a", command="ls", command_timeout=it)),
        ("code_timeout", lambda client, it: client.sessions.run("a", code="1", code_timeout=it)),
    ],
)
async def test_an_invalid_duration_is_refused(client: Any, name: str, call: Any, wrong: object) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} is .*; it is a number of seconds"):
        await got(call(client, wrong))


def test_a_negative_timeout_of_the_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="timeout is -1; it is a number of seconds from 0 on"):
        Client(timeout=-1)


def test_an_unknown_setting_is_refused(blocking_client: Client) -> None:
    wrong: dict[str, Any] = {"max_retry": 1}
    with pytest.raises(TypeError, match=r"with_options.*'max_retry'; did you mean 'max_retries'"):
        blocking_client.with_options(**wrong)


async def test_create_with_files_an_id_and_a_version(client: Any) -> None:
    own_id = f"own-{uuid4().hex}"
    session = await got(client.sessions.create(files={"a/b.txt": "x"}, session_id=own_id))
    assert session.id == own_id
    assert await got(session.read_file("a/b.txt")) == b"x"
    await got(session.close())
    session = await got(client.sessions.create(dataset="demo", sample_id="calc-1", version=1, files={"calc.py": "y"}))
    assert await got(session.read_file("calc.py")) == b"y"
    await got(session.close())
    with pytest.raises(CarrelError, match="version 7"):
        await got(client.sessions.create(dataset="demo", sample_id="calc-1", version=7))
    with pytest.raises(ConfigurationError, match="network: this server gives sessions no network"):
        await got(client.sessions.create(network=True))


async def test_unknown_sessions_samples_and_datasets(client: Any) -> None:
    for call in (client.sessions.retrieve, client.sessions.close, client.sessions.diff, client.sessions.verify.start):
        with pytest.raises(KeyError):
            await got(call("missing"))
    with pytest.raises(KeyError, match="demo"):
        await got(client.sessions.create(dataset="nothing", sample_id="x"))


async def test_a_command_of_a_closed_session_is_not_a_failed_command(server: ServerProcess, session: Any) -> None:
    def close() -> None:
        with Client(base_url=server.url, api_key=server.key) as other:
            while "sleep 100" not in str(list(other.sessions.events(session.session_id, follow=False))):
                time.sleep(0.05)
            other.sessions.close(session.session_id)

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(CommandNotRun, match="closed"):
        await got(session.execute_command("sleep 100"))
    await asyncio.to_thread(thread.join)


async def test_a_wrong_key(server: ServerProcess) -> None:
    with Client(base_url=server.url, api_key="wrong") as client:
        assert client.health.check().status
        with pytest.raises(KeyNotAccepted, match="the key is unknown, expired or revoked"):
            client.sessions.list()
    with Client(base_url=server.url) as client, pytest.raises(KeyNotAccepted, match="a key is needed"):
        client.sessions.list()


async def test_https_for_a_server_without_it(server: ServerProcess) -> None:
    with (
        Client(base_url=server.url.replace("http:", "https:"), api_key=server.key, max_retries=0) as client,
        pytest.raises(ServerUnreachable, match="write http:// in base_url"),
    ):
        client.sessions.list()


async def test_a_base_url_with_a_wrong_path(server: ServerProcess) -> None:
    with (
        Client(base_url=f"{server.url}/v2", api_key=server.key) as client,
        pytest.raises(NotFoundThere, match="base_url is its address up to /api/v1"),
    ):
        client.sessions.list()


def test_one_client_in_many_threads(blocking_client: Client) -> None:
    def work(number: int) -> list[str | None]:
        with blocking_client.sessions.create() as session:
            return [session.execute_command(f"echo {number} {turn}").stdout for turn in range(5)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(16)))
    assert found == [[f"{number} {turn}\n" for turn in range(5)] for number in range(16)]


async def test_the_synchronous_client_works_inside_a_running_loop(blocking_client: Client) -> None:
    assert asyncio.get_running_loop()
    with blocking_client.sessions.create() as session:
        assert next(session.stream("print(1)")).model_dump() == {"stream": "stdout", "text": "1\n"}


async def test_run_samples_works_in_remote_sessions(async_client: AsyncClient, tmp_path: Path) -> None:
    async def open_session(sample: tasks.Sample) -> AsyncRemoteSession:
        return await async_client.sessions.create(dataset=sample.dataset, sample_id=sample.sample_id)

    sample = tasks.Datasets().get("demo").sample("calc-1")
    agent = tasks.Agent(command="echo '# a change' >> calc.py")
    summary = await tasks.run_samples([sample], agent, open_session, tmp_path / "run")
    assert (summary.judged, summary.outcomes) == (1, {"not_solved": 1})


def test_a_job_has_the_fields_of_its_verdict() -> None:
    job = {"job_id": "j", "session_id": "s", "status": "running", "created_at": "2026-01-01T00:00:00Z"}
    running = Job.model_validate(job)
    assert (running.outcome, running.is_success, running.score, running.integrity, running.evidence) == (None,) * 5
    result = {"outcome": "solved", "is_success": True, "score": 1.0, "integrity": "clean", "evidence": ["all passed"]}
    done = Job.model_validate({**job, "status": "completed", "result": result})
    for name, value in result.items():
        assert getattr(done, name) == value
