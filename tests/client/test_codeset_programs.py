"""Programs written for the public client of this wire run on ours after another import line."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import codeset
import pytest
from codeset import types
from codeset.types import sessions as session_types
from pydantic import BaseModel

from carrel.client import AsyncClient, Client
from carrel.client._sync.resources import SyncDatasets, SyncHealth, SyncSamples, SyncVerify
from carrel.client._sync.sessions import SyncSessions
from carrel.client.transport import RequestOptions, WaitOptions
from carrel.tasks.dataset import DEMO
from carrel.wire import answers, verification
from tests.support.real_docker import IMAGE
from tests.support.server_process import ServerProcess

PROGRAM = """
import sys
IMPORT

client = Client(base_url=sys.argv[1], api_key=sys.argv[2])
print(client.health.check().service)
print([(dataset.name, dataset.sample_count) for dataset in client.datasets.list()])
page = client.samples.list(dataset="demo", page=1, page_size=2)
print(page.total_count, page.has_more, [sample.sample_id for sample in page.samples])
session = client.sessions.create(dataset="demo", sample_id="calc-1", ttl_minutes=10, poll_interval=0.5)
print(session.status, session.dataset, session.sample_id, session.created_at is not None)
ls = client.sessions.execute_command(session_id=session.session_id, command="ls; exit 3", command_timeout=20)
print(repr(ls.stdout), ls.exit_code, ls.success)
begun = client.sessions.execute_command(session.session_id, command="sleep 3", wait_for_completion=False)
print(begun.exit_code)
print(client.sessions.get_interaction(interaction_id=begun.interaction_id, session_id=session.session_id).session_id
      == session.session_id)
done = client.sessions.str_replace(
    session.session_id, file_path="README.md", str_to_insert="x", str_to_replace="no such text")
print(done.success)
job = client.sessions.verify.start(session.session_id, poll_interval=0.5)
job = client.sessions.verify.status(job.job_id, session_id=session.session_id)
print(job.status, job.result.is_success, job.result.passed, job.result.failed, job.result.tool)
print([failure["name"] for failure in job.result.failures])
print(session.session_id in [each.session_id for each in client.sessions.list().sessions])
print(client.sessions.close(session.session_id).message)
print(client.sessions.retrieve(session.session_id, timeout=20.0).status)
print(client.with_options(max_retries=1, timeout=30.0).health.check().status)
failed = client.sessions.create(dataset="demo", sample_id="calc-1", wait_for_ready=False)
print(failed.session_id != session.session_id, bool(client.sessions.close(failed.session_id)))
"""
IMPORTS = {"theirs": "from codeset import Codeset as Client", "ours": "from carrel.client import Client"}


def printed(program: str, which: str, server: ServerProcess, folder: Path) -> list[str]:
    path = folder / f"{which}.py"
    path.write_text(program.replace("IMPORT", IMPORTS[which]))
    words = [sys.executable, str(path), server.url, server.key]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_program_prints_the_same_with_both(server: ServerProcess, tmp_path: Path) -> None:
    ours = printed(PROGRAM, "ours", server, tmp_path)
    assert ours == printed(PROGRAM, "theirs", server, tmp_path)
    assert len(ours) == PROGRAM.count("print(")


@pytest.mark.real
def test_samples_in_containers_print_the_same(server: ServerProcess, docker_engine: str, tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "datasets" / "demo")
    settings = tmp_path / "datasets" / "demo" / "dataset.yaml"
    inside = f"environment: {{backend: container, image: {IMAGE}, "
    settings.write_text(settings.read_text().replace("environment: {", inside))
    assert inside in settings.read_text()
    options = ("--datasets", tmp_path / "datasets")
    containers = ServerProcess(tmp_path / "server", *options, env={"DOCKER_HOST": docker_engine}).start()
    try:
        ours = printed(PROGRAM, "ours", containers, tmp_path)
        assert ours == printed(PROGRAM, "theirs", containers, tmp_path)
    finally:
        assert containers.stop() == 0
    # What a sample's files are in makes no difference on the wire.
    assert ours == printed(PROGRAM, "theirs", server, tmp_path)


CALLS: list[tuple[Any, Any]] = [
    (codeset.resources.HealthResource, SyncHealth),
    (codeset.resources.DatasetsResource, SyncDatasets),
    (codeset.resources.SamplesResource, SyncSamples),
    (codeset.resources.SessionsResource, SyncSessions),
    (codeset.resources.sessions.verify.VerifyResource, SyncVerify),
]


@pytest.mark.parametrize(("theirs", "ours"), CALLS)
def test_every_call_of_theirs_is_there_with_its_arguments(theirs: type, ours: type) -> None:
    names = [name for name, _ in inspect.getmembers(theirs, inspect.isfunction) if not name.startswith("_")]
    assert names
    for name in names:
        wanted = inspect.signature(getattr(theirs, name)).parameters
        given = inspect.signature(getattr(ours, name)).parameters
        options = given["options"].annotation
        extra = set(get_type_hints(WaitOptions if "Wait" in str(options) else RequestOptions))
        assert set(wanted) <= set(given) | extra, name
        order = [parameter for parameter in wanted if wanted[parameter].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(given)[: len(order)] == order, name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (types.HealthCheckResponse, answers.Health),
        (types.dataset_list_response.DatasetListResponseItem, answers.DatasetInfo),
        (types.sample_list_response.Sample, answers.SampleInfo),
        (types.SampleListResponse, answers.SampleList),
        (types.Session, answers.SessionRecord),
        (types.SessionListResponse, answers.SessionPage),
        (types.SessionCloseResponse, answers.ClosedSession),
        (types.Interaction, answers.Interaction),
        (types.SessionStrReplaceResponse, answers.ReplaceResult),
        (types.ErrorInfo, verification.ErrorInfo),
        (session_types.verify_status_response.Result, verification.VerificationResult),
        (session_types.VerifyStatusResponse, verification.Job),
    ],
)
def test_every_field_of_theirs_is_there(theirs: type[BaseModel], ours: type[BaseModel]) -> None:
    assert set(theirs.model_fields) - {"container_info"} <= set(ours.model_fields)


@pytest.mark.parametrize(("theirs", "ours"), [(codeset.Codeset, Client), (codeset.AsyncCodeset, AsyncClient)])
def test_the_settings_of_theirs_are_there(theirs: type, ours: type) -> None:
    wanted = {name for name in inspect.signature(theirs).parameters if not name.startswith("_")}
    assert wanted <= set(inspect.signature(ours).parameters)


async def test_the_async_client_too(server: ServerProcess) -> None:
    async def walk(client: Any) -> list[Any]:
        session = await client.sessions.create(dataset="demo", sample_id="calc-1", poll_interval=0.5)
        done = await client.sessions.execute_command(session.session_id, command="echo $((6 * 7)); ls")
        job = await client.sessions.verify.start(session_id=session.session_id, poll_interval=0.5)
        closed = await client.sessions.close(session.session_id)
        after = await client.sessions.retrieve(session.session_id)
        await client.close()
        return [session.status, done.stdout, done.exit_code, job.result.failed, closed.message, after.status]

    settings = {"base_url": server.url, "api_key": server.key}
    assert await walk(AsyncClient(**settings)) == await walk(codeset.AsyncCodeset(**settings))  # type: ignore[arg-type]
