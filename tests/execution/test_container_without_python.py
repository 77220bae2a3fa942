"""Images without a Python that can run the worker: commands, files, diffs and verdicts work, and `run` says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel import Session
from carrel.errors import NoPython
from carrel.execution.config import ContainerConfig
from carrel.execution.container_executor import ContainerExecutor
from carrel.execution.docker_engine import connect
from carrel.tasks.environment import open_executor, prepare_sample
from carrel.tasks.sample import Sample
from carrel.tasks.verification.verifier import verify
from tests.support.real_docker import make_bare_image

pytestmark = pytest.mark.real
PROGRAMS = ["sh", "cat", "grep", "sleep", "touch", "sed", "mkdir", "rm", "ls", "test", "pwd"]
OLD = '#!/bin/sh\necho "no usable Python: it is version 3.6.8" >&2\nexit 1\n'
"""What the worker's program prints in an old Python, which reads it as far as that line."""


@pytest.fixture(params=["none", "old", "broken"])
def image(docker_engine: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """From scratch: without Python, with one that is too old, and with one whose library is missing."""
    name = f"carrel-tests-no-python-{request.param}:{os.getpid()}"
    programs = [*PROGRAMS, "python3"] if request.param == "broken" else PROGRAMS
    make_bare_image(docker_engine, name, programs, {"bin/python3": OLD} if request.param == "old" else {})
    yield name
    connect(docker_engine)._api.remove_image(name, force=True)


async def test_commands_and_files_work_and_code_says_why_not(image: str, docker_engine: str, tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text("one\n")
    config = ContainerConfig(image=image, docker_host=docker_engine, workspace=tmp_path)
    async with ContainerExecutor(config) as executor:
        done = await executor.exec("cat given.txt; echo $PATH; cat >&2", stdin="typed")
        assert (done.exit_code, done.stdout, done.stderr) == (0, "one\n/bin\n", "typed")
        late = await executor.exec("echo begun; sleep 60 & sleep 60", timeout=1)
        assert (late.exit_code, late.stdout) == (124, "begun\n")
        await executor.write_file("a/b.txt", b"two\n")
        assert await executor.read_file("a/b.txt") == b"two\n"
        await executor.str_replace("given.txt", "one", "three")
        assert [entry.name for entry in await executor.list_files()] == ["a", "given.txt"]
        assert [change.path for change in await executor.changed_files()] == ["a/b.txt", "given.txt"]
        assert "+three" in await executor.diff()
        with pytest.raises(FileNotFoundError):
            await executor.exec(["no-such-program"])

        result = await executor.run("1 + 1")
        assert (result.error_type, "Commands and files work" in (result.error or "")) == ("NoPython", True), result
        assert image in (result.error or "")
        for refused in (executor.set_variables({"x": 1}), executor.reset(), executor.install(["six"])):
            with pytest.raises(NoPython, match=image):
                await refused
        assert await executor.variables() == []
        has = executor.supported_capabilities()
        assert {"container_isolation", "timeout"} <= has
        assert not {"reset", "interrupt", "streaming", "deps_install"} & has
        async with await executor.fork() as fork:
            assert (await fork.exec("cat given.txt a/b.txt")).stdout == "three\ntwo\n"
    with pytest.raises(NoPython, match="no packages can be added"):
        await ContainerExecutor(ContainerConfig(image=image, docker_host=docker_engine, deps=["six"])).start()


async def test_a_session_and_a_verdict(
    docker_engine: str, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    async with Session.container(tmp_path / "base", image=image) as session:
        assert (await session.execute_command("echo hello > f; cat f")).stdout == "hello\n"
        assert (await session.run("1")).error_type == "NoPython"
        assert await session.variables() == []
        assert not session.supports("streaming")
    files = tmp_path / "files"
    files.mkdir()
    (files / "greeting.txt").write_text("hello\n")
    sample = Sample.model_validate(
        {
            "sample_id": "greeting",
            "files": files,
            "environment": {"backend": "container", "image": image},
            "verify": {"command": "grep -qx 'hello world' greeting.txt", "timeout": 60},
        }
    )
    prepared = await prepare_sample(sample, tmp_path / "cache")
    executor = await open_executor(prepared)
    try:
        before = await verify(sample, executor, prepared=prepared)
        assert before.outcome == "not_solved", before
        await executor.exec("echo hello world > greeting.txt")
        result = await verify(sample, executor, prepared=prepared)
        assert (result.outcome, result.carried_over) == ("solved", ["greeting.txt"]), result
        # Only the exit code says what was tested, and no file that decides the verdict was written.
        assert result.integrity == "unknown", result
    finally:
        await executor.close()
