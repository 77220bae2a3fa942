"""The public client of this API, unchanged and in its strict mode: all of it works, and a short command is quick."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import codeset
import httpx
import pytest

from tests.support.server_process import ServerProcess


@pytest.fixture
def public(server: ServerProcess) -> Iterator[codeset.Codeset]:
    with codeset.Codeset(
        base_url=server.url, api_key=server.key, _strict_response_validation=True, max_retries=0
    ) as client:
        yield client


def test_a_session_from_creation_to_verdict(public: codeset.Codeset) -> None:
    assert public.health.check().status == "healthy"
    assert [dataset.name for dataset in public.datasets.list()] == ["demo"]
    samples = public.samples.list(dataset="demo").samples
    sample = next(each for each in samples if each.sample_id == "calc-1")

    session = public.sessions.create(dataset="demo", sample_id="calc-1")
    assert session.status == "ready"
    assert session.duration_seconds is not None
    assert session.duration_seconds >= 0
    listed = public.sessions.execute_command(session_id=session.session_id, command="ls")
    assert listed.exit_code == 0
    assert "calc.py" in (listed.stdout or "")
    assert listed.success
    assert isinstance(listed.execution_time_seconds, float)

    before = public.sessions.verify.start(session_id=session.session_id)
    assert before.status == "completed"
    assert before.result is not None
    assert not before.result.is_success
    assert before.result.failed > 0

    heredoc = f"git apply <<'END'\n{sample.patch}\nEND"
    applied = public.sessions.execute_command(session_id=session.session_id, command=heredoc)
    assert applied.exit_code == 0, applied.stderr
    after = public.sessions.verify.start(session_id=session.session_id)
    assert after.result is not None
    assert after.result.is_success
    assert after.result.tool == "test_suite"

    closed = public.sessions.close(session_id=session.session_id)
    assert closed.duration_seconds > 0
    assert public.sessions.retrieve(session.session_id).status == "closed"
    assert session.session_id in [each.session_id for each in public.sessions.list().sessions]
    again = public.sessions.verify.status(after.job_id, session_id=session.session_id)
    assert again == after


def test_a_text_is_replaced(public: codeset.Codeset) -> None:
    session = public.sessions.create(dataset="demo", sample_id="calc-1")
    given: dict[str, Any] = {"session_id": session.session_id, "file_path": "README.md"}
    public.sessions.execute_command(session_id=session.session_id, command="printf 'one two two' > README.md")
    done = public.sessions.str_replace(**given, str_to_replace="one", str_to_insert="1")
    assert done.success
    twice = public.sessions.str_replace(**given, str_to_replace="two", str_to_insert="2")
    assert not twice.success
    assert "2 times" in twice.message
    shown = public.sessions.execute_command(session_id=session.session_id, command="cat README.md")
    assert shown.stdout == "1 two two"
    public.sessions.close(session_id=session.session_id)


def test_a_short_command_does_not_wait_for_the_next_poll(public: codeset.Codeset) -> None:
    """The client asks a second time only after 3 s, or here, 60 s."""
    session = public.sessions.create(dataset="demo", sample_id="calc-1", poll_interval=60)
    began = time.monotonic()
    for _ in range(5):
        public.sessions.execute_command(session_id=session.session_id, command="true", poll_interval=60)
    assert time.monotonic() - began < 60
    public.sessions.close(session_id=session.session_id)


def test_a_longer_command_is_polled(public: codeset.Codeset) -> None:
    session = public.sessions.create(dataset="demo", sample_id="calc-1")
    done = public.sessions.execute_command(
        session_id=session.session_id, command="sleep 1.5; echo done", poll_interval=0.2
    )
    assert done.stdout == "done\n"
    public.sessions.close(session_id=session.session_id)


def test_what_cannot_be_run_at_all(public: codeset.Codeset) -> None:
    session = public.sessions.create(dataset="demo", sample_id="calc-1")
    waiting = public.sessions.execute_command(
        session_id=session.session_id, command="sleep 60", wait_for_completion=False
    )
    assert waiting.exit_code is None
    public.sessions.close(session_id=session.session_id)
    ended = public.sessions.get_interaction(session.session_id, waiting.interaction_id)
    assert ended.exit_code == -1000
    assert "closed" in (ended.message or "")


def test_errors_are_the_clients_own(public: codeset.Codeset, server: ServerProcess) -> None:
    with pytest.raises(codeset.NotFoundError, match="calc-1"):
        public.sessions.create(dataset="demo", sample_id="calc-11")
    with pytest.raises(codeset.NotFoundError):
        public.sessions.retrieve("unknown")
    with pytest.raises(codeset.AuthenticationError):
        codeset.Codeset(base_url=server.url, api_key="wrong", max_retries=0).sessions.list()
    with pytest.raises(codeset.UnprocessableEntityError, match="ttl_minutes"):
        public.sessions.create(dataset="demo", sample_id="calc-1", ttl_minutes=0)
    session = public.sessions.create(dataset="demo", sample_id="calc-1")
    public.sessions.close(session_id=session.session_id)
    with pytest.raises(codeset.ConflictError, match="closed"):
        public.sessions.execute_command(session_id=session.session_id, command="true")


def test_samples_come_in_pages(public: codeset.Codeset) -> None:
    every = public.samples.list()
    assert (every.total_count, every.has_more, every.page) == (len(every.samples), False, 1)
    first = public.samples.list(page=1, page_size=4)
    second = public.samples.list(page=2, page_size=4)
    assert (first.has_more, second.has_more) == (True, False)
    names = [sample.sample_id for sample in (*first.samples, *second.samples)]
    assert names == [sample.sample_id for sample in every.samples]
    assert [sample.sample_id for sample in public.samples.list(search="CALC").samples] == ["calc-1"]


def test_a_samples_files_are_downloaded(public: codeset.Codeset) -> None:
    answer = public.samples.with_raw_response.download("calc-1", dataset="demo")
    with tarfile.open(fileobj=io.BytesIO(answer.http_response.content)) as archive:
        assert "calc.py" in archive.getnames()
        assert all(entry.uid == 0 for entry in archive)


async def test_the_async_client(server: ServerProcess) -> None:
    async with codeset.AsyncCodeset(
        base_url=server.url, api_key=server.key, _strict_response_validation=True, max_retries=0
    ) as public:
        session = await public.sessions.create(dataset="demo", sample_id="calc-1")
        done = await public.sessions.execute_command(session_id=session.session_id, command="echo here")
        assert done.stdout == "here\n"
        job = await public.sessions.verify.start(session_id=session.session_id)
        assert job.status == "completed"
        await public.sessions.close(session_id=session.session_id)


def test_a_client_of_an_older_version_has_the_output_at_once(server: ServerProcess, client: httpx.Client) -> None:
    """0.3.0 reads exit_code, stdout, stderr and execution_time_seconds from the answer to exec itself."""
    created = client.post("/sessions", json={"dataset": "demo", "sample_id": "calc-1"}).json()
    while client.get(f"/sessions/{created['session_id']}").json()["status"] != "ready":
        time.sleep(0.05)
    done = client.post(
        f"/sessions/{created['session_id']}/exec",
        json={"command": "sleep 1.2; echo late; exit 3", "command_timeout": 20},
        headers={"X-Stainless-Package-Version": "0.3.0"},
    ).json()
    assert (done["exit_code"], done["stdout"], done["stderr"]) == (3, "late\n", "")
    assert type(done["execution_time_seconds"]) is float
    client.delete(f"/sessions/{created['session_id']}")
