"""Samples in containers of a real Docker engine: sessions, verdicts and runs, and what is refused."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from carrel import Client
from carrel.cli import task as task_commands
from carrel.errors import DatasetInvalid, ForkRefused, SandboxUnavailable
from carrel.execution.docker_engine import connect
from carrel.session import Session
from carrel.tasks.dataset import Dataset
from carrel.tasks.dataset_check import check
from carrel.tasks.environment import ContainerPool, TaskExecutor, open_executor, prepare_sample, sample_executor
from carrel.tasks.file_cache import prune
from carrel.tasks.importers.swebench import import_swebench
from carrel.tasks.runner import Agent, local_sessions, run_samples
from carrel.tasks.sample import WIRE_FIELDS, Sample
from carrel.tasks.verification.changes import Changes
from carrel.tasks.verification.verifier import grade, grade_patch, verify
from tests.support.git_repository import Repository
from tests.support.missing_parts import skip_without
from tests.support.real_docker import IMAGE
from tests.support.samples import ADD, CALC, COMMAND, GOLD, ONE, PYTEST_ENV, SOLVE, calc, written
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.real
IN_IMAGE: dict[str, Any] = {"backend": "container", "image": IMAGE, "env": PYTEST_ENV}
NEW_TEST = """--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -7,3 +7,7 @@ def test_add():

 def test_one():
     assert one() == 1
+
+
+def test_more():
+    assert add(2, 2) == 4
"""


def containers(address: str) -> list[str]:
    """Those of this process; the engine may be shared with others."""
    label = f"carrel.host={os.uname().nodename}:{os.getpid()}"
    return [each["Id"] for each in connect(address)._api.containers(all=True, filters={"label": label})]


@pytest.fixture(autouse=True)
def engine(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    return docker_engine


@pytest.fixture
async def executor(tmp_path: Path, cache: Path) -> AsyncIterator[TaskExecutor]:
    sample = calc(tmp_path / "calc", environment=IN_IMAGE)
    executor = await open_executor(await prepare_sample(sample, cache))
    yield executor
    await executor.close()


async def test_work_in_a_container_is_judged_in_another(tmp_path: Path, cache: Path, engine: str) -> None:
    more: dict[str, Any] = {
        "test_patch": NEW_TEST,
        "fail_to_pass": [ADD, "tests/test_calc.py::test_more"],
        "pass_to_pass": [ONE],
    }
    sample = calc(tmp_path / "calc", environment=IN_IMAGE, **more)
    prepared = await prepare_sample(sample, cache)
    executor = await open_executor(prepared)
    try:
        before = await verify(sample, executor, prepared=prepared)
        assert (before.outcome, before.integrity) == ("not_solved", "clean"), before
        await executor.exec(f"{SOLVE}; echo 'raise SystemExit' > tests/test_calc.py; touch /tmp/left; sleep 99 &")
        result = await verify(sample, executor, prepared=prepared)
        assert (result.outcome, result.integrity, result.carried_over) == ("solved", "clean", ["calc.py"]), result
        assert result.left_out == {"tests/test_calc.py": "a file of the hidden tests"}
        assert len(containers(engine)) == 1
    finally:
        await executor.close()
    assert (await grade_patch(sample, GOLD, cache=cache)).outcome == "solved"
    assert (await grade(sample, Changes(), cache=cache)).outcome == "not_solved"
    assert containers(engine) == []


async def test_processes_that_are_stopped_from_inside_end_in_time(tmp_path: Path, cache: Path, engine: str) -> None:
    sample = calc(tmp_path / "calc", environment=IN_IMAGE, verify={"command": COMMAND, "timeout": 5})
    prepared = await prepare_sample(sample, cache)
    executor = await open_executor(prepared)
    try:
        await executor.write_file("calc.py", "import os, signal, time\nos.kill(-1, signal.SIGSTOP)\ntime.sleep(600)\n")
        result = await asyncio.wait_for(verify(sample, executor, prepared=prepared), 120)
    finally:
        await executor.close()
    assert result.outcome in ("tests_did_not_run", "not_solved"), result
    assert containers(engine) == []


async def test_a_verdict_under_gvisor(tmp_path: Path, cache: Path, engine: str) -> None:
    if not connect(engine).has_runtime("runsc"):
        skip_without("the engine has no runtime runsc (gVisor)")
    sample = calc(tmp_path / "calc", environment={**IN_IMAGE, "runtime": "runsc"})
    prepared = await prepare_sample(sample, cache)
    executor = await open_executor(prepared)
    try:
        await executor.exec(SOLVE)
        result = await verify(sample, executor, prepared=prepared)
        assert (result.outcome, result.integrity) == ("solved", "clean"), result
        found = [connect(engine)._api.inspect_container(each) for each in containers(engine)]
        assert [container["HostConfig"]["Runtime"] for container in found] == ["runsc"]
    finally:
        await executor.close()


async def test_a_session_in_a_container_is_forked(tmp_path: Path, cache: Path, engine: str) -> None:
    sample = calc(tmp_path / "calc", environment=IN_IMAGE)
    open_session = task_commands._recorded_sessions(Agent(command="true"), tmp_path / "base", cache)
    session = await open_session(sample)
    assert isinstance(session, Session)
    try:
        await session.execute_command(SOLVE)
        fork = await session.fork()
        try:
            await session.execute_command("rm calc.py")
            assert (await fork.verify()).outcome == "solved"
            assert (await session.verify()).outcome != "solved"
        finally:
            await fork.close()
        await session.run("x = 1")
        with pytest.raises(ForkRefused, match="variables cannot be carried over: x"):
            await session.fork()
    finally:
        await session.close()


async def test_a_run_and_a_session(tmp_path: Path, cache: Path) -> None:
    sample = calc(tmp_path / "calc", environment=IN_IMAGE)
    agent = Agent(command=SOLVE)
    total = await run_samples([sample], agent, local_sessions(agent, cache), tmp_path / "run")
    assert (total.solved, total.attempts) == (1, 1), (tmp_path / "run" / "results.jsonl").read_text()
    session = await task_commands._recorded_sessions(agent, tmp_path / "base", cache)(sample)
    try:
        assert isinstance(session, Session)
        assert (await session.run("2 + 2")).value == 4
        await session.execute_command(SOLVE)
        assert (await session.verify()).outcome == "solved"
    finally:
        await session.close()


async def test_containers_of_an_image_are_started_in_advance(tmp_path: Path, cache: Path, engine: str) -> None:
    samples = [calc(tmp_path / name, {"name": name}, sample_id=name, environment=IN_IMAGE) for name in ("a", "b", "c")]
    pool = ContainerPool(1)
    opened = []
    try:
        for sample in samples:
            opened.append(sample_executor(sample, cache, containers=pool))
            await opened[-1].start()
            assert (await opened[-1].exec("cat name")).stdout == sample.sample_id
            while pool._background:
                await asyncio.wait(pool._background)
        # The second was the first of which another was started in advance.
        assert len(await asyncio.to_thread(containers, engine)) == 4
        used = {str(getattr(each._connection.transport, "_container", "")) for each in opened if each._connection}
        (warm,) = set(containers(engine)) - used
        await asyncio.to_thread(connect(engine)._api.kill, warm)
        opened.append(sample_executor(samples[0], cache, containers=pool))
        await opened[-1].start()
        assert (await opened[-1].exec("cat name")).stdout == "a"
    finally:
        for executor in opened:
            await executor.close()
        await pool.close()
    assert await asyncio.to_thread(containers, engine) == []


def test_a_server_with_samples_in_containers(tmp_path: Path, engine: str) -> None:
    sample = calc(tmp_path / "datasets" / "mine" / "files" / "calc", environment=IN_IMAGE)
    fields = sample.model_dump(mode="json", include={"sample_id", "environment", "verify", *WIRE_FIELDS})
    (tmp_path / "datasets" / "mine" / "samples.jsonl").write_text(
        json.dumps({**fields, "dataset": "", "created_at": None, "files": "files/calc"}) + "\n"
    )
    server = ServerProcess(tmp_path / "server", "--datasets", tmp_path / "datasets", env={"DOCKER_HOST": engine})
    try:
        server.start()
        client = Client(base_url=server.url, api_key=server.key)
        for _ in range(2):
            session = client.sessions.create(dataset="mine", sample_id="calc-1")
            assert session.status == "ready", session
            done = client.sessions.execute_command(session_id=session.session_id, command=f"{SOLVE}; ls")
            assert (done.stdout or "").split() == ["calc.py", "tests"]
            job = client.sessions.verify.start(session_id=session.session_id)
            assert job.result is not None
            assert (job.result.is_success, job.result.integrity) == (True, "clean"), job
            client.sessions.close(session_id=session.session_id)
    finally:
        assert server.stop() == 0


@pytest.fixture
def image(tmp_path: Path, engine: str) -> Iterator[str]:
    """An image with a repository at /testbed, as SWE-bench has them."""
    repo = Repository(written(tmp_path / "testbed", CALC))
    repo.commit("Begin")
    repo.commit("Fix", {"calc.py": CALC["calc.py"].replace("a - b", "a + b")})
    api, archive = connect(engine)._api, io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(repo.folder, "testbed")
    made = api.create_container(IMAGE, ["/"])["Id"]
    api.put_archive(made, "/", archive.getvalue())
    api.commit(made, f"sweb.eval.ada_1776_calc-{os.getpid()}", "1")
    api.remove_container(made)
    yield f"sweb.eval.{{hub_id}}-{os.getpid()}:1"
    api.remove_image(f"sweb.eval.ada_1776_calc-{os.getpid()}:1")


async def test_rows_of_swebench_with_images(image: str, tmp_path: Path, cache: Path, engine: str) -> None:
    base = Repository.at(tmp_path / "testbed").git("rev-parse", "HEAD~1")
    Repository.at(tmp_path / "testbed").git("checkout", "-q", base)
    row: dict[str, Any] = {"instance_id": "Ada__calc", "base_commit": base, "patch": GOLD, "test_patch": NEW_TEST}
    row |= {"FAIL_TO_PASS": [ADD, "tests/test_calc.py::test_more"], "PASS_TO_PASS": [ONE]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"environment": {"workdir": "/testbed", "env": PYTEST_ENV}, "verify": {"command": COMMAND}}
    done = import_swebench(tmp_path / "rows.jsonl", None, tmp_path / "swe", settings, image_template=image)
    assert (done.samples, done.left_out) == (["Ada__calc"], [])
    (sample,) = Dataset.load(tmp_path / "swe").samples
    (finding,) = await check([sample], cache=cache)
    assert finding.status == "right", finding.faults
    executor = await open_executor(await prepare_sample(sample, cache))
    try:
        # Its own files are those of the base commit, whatever else the image has of the history.
        seen = (await executor.exec("pwd; ls -A; grep -c 'a - b' calc.py; ls .git/objects | wc -l")).stdout.split()
        assert seen[:5] == ["/testbed", ".git", "calc.py", "tests", "1"]
    finally:
        await executor.close()
    (archive,) = (cache / "images").glob("*.tar.gz")
    os.utime(archive, (1, archive.stat().st_mtime))
    await prepare_sample(sample, cache)
    assert archive.stat().st_atime > 1, "it is used again now"
    assert f"images/{archive.name}" in [each.name for each in prune(cache, time.time() + 60).removed]
    assert list((cache / "images").iterdir()) == []
    assert containers(engine) == []


def test_a_template_of_images_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instance_id": "a", "FAIL_TO_PASS": ["x"]}) + "\n")
    with pytest.raises(DatasetInvalid, match=r"\{instance_id\} and \{hub_id\} only"):
        import_swebench(tmp_path / "rows.jsonl", None, tmp_path / "swe", {}, image_template="x.{name}")


async def test_an_image_that_is_missing(tmp_path: Path, cache: Path) -> None:
    sample = calc(tmp_path / "calc", environment={**IN_IMAGE, "image": "no-such-image:1"})
    with pytest.raises(SandboxUnavailable, match="the image no-such-image:1 is not on the engine"):
        await open_executor(await prepare_sample(sample, cache))
    result = await grade_patch(sample, GOLD, cache=cache)
    assert result.outcome == "infrastructure_failed"
    assert "no-such-image:1" in result.evidence[0]


async def test_no_engine(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    sample = calc(tmp_path / "calc", environment=IN_IMAGE)
    result = await grade_patch(sample, GOLD, cache=cache)
    assert (result.outcome, result.is_success) == ("infrastructure_failed", False), result


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"backend": "container"}, "backend: container needs an image"),
        ({"image": "x"}, "backend: container needs an image"),
        ({"backend": "container", "image": "x", "setup": ["make"]}, "build them into the image"),
    ],
)
def test_settings_that_do_not_fit(environment: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Sample(sample_id="a", environment=environment)


async def test_the_engine_gets_nothing_of_the_host(executor: TaskExecutor, engine: str) -> None:
    (container,) = containers(engine)
    mounts = connect(engine)._api.inspect_container(container)["Mounts"]
    assert [mount["Type"] for mount in mounts if mount["Type"] == "bind"] == []
    assert (await executor.exec("git --version; ls")).stdout.split() == ["calc.py", "tests"]
