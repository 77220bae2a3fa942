"""The sandbox `carrel` against Inspect's own checks of sandboxes, and in evaluations."""

from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.frameworks import require

require("inspect_ai")

from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentSpec, SandboxUnavailableError, sandbox
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from carrel import MemoryStorage, Session
from carrel.adapters.inspect import CarrelSandbox, CarrelSandboxConfig, dataset_task
from carrel.tasks import Datasets

pytestmark = pytest.mark.real

EXCEPTIONS = {
    # self_check.py makes a user with `adduser` and runs a command as that user.
    "test_exec_as_user": "a session has two users, agent and root; its system folders cannot be changed",
}


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[CarrelSandbox]:
    if request.node.originalname in EXCEPTIONS:
        request.applymarker(pytest.mark.xfail(reason=EXCEPTIONS[request.node.originalname], strict=True))
    async with Session(MemoryStorage()) as session:
        yield CarrelSandbox(session)


def test_the_exceptions_name_checks() -> None:
    checks = [name for name in vars(self_check) if name.startswith("test_")]
    assert len(checks) == 44
    assert set(EXCEPTIONS) <= set(checks)


# --- evaluations ------------------------------------------------------------------------------------------------------


@solver
def apply_patch(samples: tuple[str, ...]) -> Solver:
    """Solve these samples of the demo with the patches that come with them."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id in samples:
            patch = Datasets().get("demo").sample(str(state.sample_id)).patch
            done = await sandbox().exec(["patch", "-p1"], input=patch)
            assert done.success, done
        return state

    return solve


def evaluate(task: Any, tmp_path: Path, **settings: Any) -> Any:
    [log] = inspect_eval(task, model="mockllm/model", display="none", log_dir=str(tmp_path / "logs"), **settings)
    assert log.status == "success", log.error
    return log


def test_a_task_from_a_dataset_is_scored_by_its_verdicts(tmp_path: Path) -> None:
    log = evaluate(dataset_task("demo"), tmp_path, solver=apply_patch(("calc-1",)))
    scores = {sample.id: sample.scores["verdict"] for sample in log.samples}
    assert scores.keys() == {sample.sample_id for sample in Datasets().get("demo").samples}
    assert {name: (score.value, score.answer) for name, score in scores.items() if score.answer != "not_solved"} == {
        "calc-1": ("C", "solved")
    }


def test_a_task_of_a_program_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "a.txt").write_text("one\n")
    config = CarrelSandboxConfig(workspace=str(tmp_path / "repository"))
    task = Task(
        dataset=[
            Sample(input="?", target="two\n", files={"b.txt": "two\n"}, setup="#!/bin/sh\ncat a.txt b.txt > c.txt")
        ],
        solver=read_file("c.txt"),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("carrel", config),
    )
    log = evaluate(task, tmp_path)
    assert log.samples[0].output.completion == "one\ntwo\n"
    assert log.results.scores[0].metrics["accuracy"].value == 1
    assert sorted(path.name for path in (tmp_path / "repository").iterdir()) == ["a.txt"]
    assert log.eval.sandbox.config == config


@solver
def read_file(name: str) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output = ModelOutput.from_content("mockllm/model", await sandbox().read_file(name))
        return state

    return solve


async def test_a_closed_session_is_unavailable(sandbox_env: CarrelSandbox) -> None:
    await sandbox_env.session.close()
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["true"])


async def test_too_much_output_is_an_error(sandbox_env: CarrelSandbox) -> None:
    with override_max_exec_output_size(1000), pytest.raises(OutputLimitExceededError):
        await sandbox_env.exec(["seq", "1000"])


def test_the_sandbox_is_an_entry_point() -> None:
    [found] = [one for one in entry_points(group="inspect_ai") if one.name == "carrel"]
    assert found.value == "carrel.adapters.inspect"
