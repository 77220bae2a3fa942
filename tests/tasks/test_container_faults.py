"""Faults of samples in containers: the engine, a container or the server ends, a disk is full, many come at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import CarrelError, SandboxUnavailable, WorkspaceLost
from carrel.execution.docker_engine import LABEL, connect
from carrel.tasks.environment import open_executor, prepare_sample
from carrel.tasks.run_folder import RunFolder
from carrel.tasks.runner import Agent, local_sessions, run_samples
from carrel.tasks.sample import Sample
from carrel.tasks.verification.verifier import verify
from tests.support.missing_parts import skip_without
from tests.support.real_docker import IMAGE, NoEngine, private_engine
from tests.support.samples import PYTEST_ENV, SOLVE, calc
from tests.support.server_process import ServerProcess, create_session, run_command, write_dataset

pytestmark = pytest.mark.real
IN_IMAGE: dict[str, Any] = {"backend": "container", "image": IMAGE, "env": PYTEST_ENV}


@pytest.fixture
def engine(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    return docker_engine


@pytest.fixture
def mortal_engine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an engine that a test may stop."""
    folder = tmp_path_factory.mktemp("engine")
    try:
        with private_engine(folder) as address:
            monkeypatch.setenv("DOCKER_HOST", address)
            yield folder
    except NoEngine as reason:
        skip_without(f"no container engine: {reason}")


def containers(address: str, pid: int | None = None) -> list[str]:
    """Those of a host, by default of this process; the engine may be shared with others."""
    label = f"carrel.host={os.uname().nodename}:{pid or os.getpid()}"
    return [each["Id"] for each in connect(address)._api.containers(all=True, filters={"label": label})]


def sample_in(folder: Path, **environment: Any) -> Sample:
    return calc(folder / "calc", environment={**IN_IMAGE, **environment})


async def test_the_engine_is_stopped_in_the_middle_of_a_run(mortal_engine: Path, tmp_path: Path, cache: Path) -> None:
    sample, agent = sample_in(tmp_path), Agent(command="sleep 100")
    running = asyncio.create_task(
        run_samples([sample], agent, local_sessions(agent, cache), tmp_path / "run", attempts=2, workers=1)
    )
    address = os.environ["DOCKER_HOST"]
    while not await asyncio.to_thread(containers, address):
        await asyncio.sleep(0.1)
        assert not running.done(), await running
    await asyncio.sleep(1)
    os.kill(int((mortal_engine / "pid").read_text()), signal.SIGTERM)
    total = await asyncio.wait_for(running, 120)
    assert total.judged == 0
    results = RunFolder(tmp_path / "run").read_results()
    assert [result.outcome for result in results] == ["infrastructure_failed"] * 2
    assert "no container engine answers" in results[1].verdict.evidence[0]
    with pytest.raises(SandboxUnavailable, match="no container engine answers"):
        await open_executor(await prepare_sample(sample, cache))


async def test_a_container_that_is_killed_from_outside(tmp_path: Path, cache: Path, engine: str) -> None:
    sample = sample_in(tmp_path)
    prepared = await prepare_sample(sample, cache)
    executor = await open_executor(prepared)
    try:
        await executor.exec(SOLVE)
        waiting = asyncio.create_task(executor.exec("sleep 100"))
        await asyncio.sleep(0.5)
        (container,) = await asyncio.to_thread(containers, engine)
        await asyncio.to_thread(connect(engine)._api.kill, container)
        with pytest.raises(WorkspaceLost, match="what was changed in its files is gone"):
            await asyncio.wait_for(waiting, 60)
        result = await verify(sample, executor, prepared=prepared)
        assert (result.outcome, result.is_success) == ("infrastructure_failed", False), result
        assert "what was changed in its files is gone" in result.evidence[0]
    finally:
        await executor.close()
    assert await asyncio.to_thread(containers, engine) == []


async def test_a_disk_that_is_full_inside(tmp_path: Path, cache: Path, engine: str) -> None:
    sample = sample_in(tmp_path, limits={"disk": "4MiB", "files": 400})
    prepared = await prepare_sample(sample, cache)
    executor = await open_executor(prepared)
    try:
        full = await executor.exec("head -c 9000000 /dev/zero > large")
        assert not full.success
        assert "No space left on device" in full.stderr
        with pytest.raises(OSError, match="No space left on device"):
            await executor.write_file("other", bytes(5_000_000))
        await executor.exec(f"rm -f large other; {SOLVE}; head -c 9000000 /dev/zero > large")
        result = await verify(sample, executor, prepared=prepared)
        assert result.outcome in ("solved", "infrastructure_failed"), result
        await executor.exec(f"rm large; {SOLVE}")
        assert (await verify(sample, executor, prepared=prepared)).outcome == "solved"
    finally:
        await executor.close()
    assert await asyncio.to_thread(containers, engine) == []


async def test_files_that_do_not_fit_into_the_container(tmp_path: Path, cache: Path, engine: str) -> None:
    sample = sample_in(tmp_path, limits={"disk": "1MiB"})
    (tmp_path / "calc" / "large").write_bytes(os.urandom(3_000_000))
    with pytest.raises(CarrelError, match="No space left on device"):
        await open_executor(await prepare_sample(sample, cache))
    assert await asyncio.to_thread(containers, engine) == []


async def test_thirty_at_once(tmp_path: Path, cache: Path, engine: str) -> None:
    prepared = await prepare_sample(sample_in(tmp_path), cache)

    async def work(number: int) -> str:
        executor = await open_executor(prepared)
        try:
            await executor.write_file("mine", str(number).encode())
            return (await executor.exec("cat mine")).stdout
        finally:
            await executor.close()

    assert await asyncio.gather(*map(work, range(30))) == [str(number) for number in range(30)]
    assert await asyncio.to_thread(containers, engine) == []


def test_a_server_that_is_killed_leaves_no_container(tmp_path: Path, engine: str) -> None:
    datasets = tmp_path / "datasets"
    write_dataset(datasets / "mine", [{"sample_id": "calc-1", "files": "files/calc", "environment": IN_IMAGE}])
    sample_in(datasets / "mine" / "files")
    server = ServerProcess(tmp_path / "server", "--datasets", datasets, env={"DOCKER_HOST": engine}).start()
    pid = server.pid
    try:
        with server.client() as client:
            session = create_session(client, dataset="mine", sample_id="calc-1")
            assert run_command(client, session, "echo here")["stdout"] == "here\n"
        assert containers(engine, pid) != []
    finally:
        server.kill()
    end = time.monotonic() + 60
    while left := containers(engine, pid):
        assert time.monotonic() < end, left
        time.sleep(0.2)


def test_containers_of_a_killed_host_are_swept(engine: str) -> None:
    """Those that were made and never started, and those that ended and were not removed."""
    found = connect(engine)
    labels = {LABEL: "swept", "carrel.test": f"sweep-{os.getpid()}"}
    # Limits, since Podman's defaults are more than some hosts can set.
    limits = [{"name": name, "soft": 1024, "hard": 1024} for name in ("nofile", "nproc")]
    container = {"image": IMAGE, "command": ["true"], "labels": labels}
    made = [found.create(container, {"ulimits": limits}) for _ in range(2)]
    found._api.start(made[0])
    found._api.wait(made[0])
    found.sweep(f"carrel.test=sweep-{os.getpid()}", unused=3600)
    assert len(found._api.containers(all=True, filters={"label": f"carrel.test=sweep-{os.getpid()}"})) == 2
    found.sweep(f"carrel.test=sweep-{os.getpid()}", unused=-5)
    assert found._api.containers(all=True, filters={"label": f"carrel.test=sweep-{os.getpid()}"}) == []
