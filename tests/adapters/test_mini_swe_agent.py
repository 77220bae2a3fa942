"""CarrelEnvironment against mini-swe-agent's local environment, and its agent on a sample of the demo."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.frameworks import require

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
require("minisweagent")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import Submitted
from minisweagent.models.test_models import DeterministicModel, make_output

from carrel import MemoryStorage, SyncSession
from carrel.adapters.mini_swe_agent import CarrelEnvironment
from carrel.tasks import Datasets

pytestmark = pytest.mark.real

COMMANDS = [
    "echo out; echo err >&2; exit 3",
    "printf no-newline",
    "cd / && pwd",
    "echo $NAME",
    "no-such-program",
    "cat <<'END'\nseveral\nlines\nEND",
    "printf '\\377'",
    "true",
]


@pytest.fixture
def environment() -> Iterator[CarrelEnvironment]:
    with SyncSession(MemoryStorage()) as session:
        yield CarrelEnvironment(session, env={"NAME": "value"})


def test_commands_give_what_the_local_environment_gives(environment: CarrelEnvironment) -> None:
    local = LocalEnvironment(env={"NAME": "value"})
    for command in COMMANDS:
        expected = local.execute({"command": command})
        assert environment.execute({"command": command}) == expected, command


def test_a_command_that_fails_to_start_or_to_end(environment: CarrelEnvironment) -> None:
    late = environment.execute({"command": "echo begun; sleep 30"}, timeout=1)
    assert (late["output"], late["returncode"], late["extra"]["exception_type"]) == ("begun\n", -1, "TimeoutError")
    missing = environment.execute({"command": "true"}, cwd="/nowhere")
    assert (missing["returncode"], missing["extra"]["exception_type"]) == (-1, "FileNotFoundError")


def test_the_end_of_a_task(environment: CarrelEnvironment) -> None:
    with pytest.raises(Submitted) as caught:
        environment.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo diff"})
    assert caught.value.messages[0]["content"] == "diff\n"
    assert environment.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; exit 1"})["returncode"] == 1


def test_every_public_method_of_the_local_environment_is_there() -> None:
    wanted = {name for name in vars(LocalEnvironment) if not name.startswith("_")}
    assert wanted <= set(dir(CarrelEnvironment))


def test_an_environment_from_a_configuration(tmp_path: Path) -> None:
    kind = "carrel.adapters.mini_swe_agent.CarrelEnvironment"
    environment: Any = get_environment({"environment_class": kind, "base": str(tmp_path), "cwd": "/tmp", "timeout": 5})
    try:
        assert environment.execute({"command": "pwd"})["output"] == "/tmp\n"
        assert environment.get_template_vars(a=1)["a"] == 1
        about = environment.serialize()["info"]["config"]
        assert (about["environment"]["timeout"], about["environment_type"]) == (5, kind)
    finally:
        environment.close()


def test_the_agent_solves_a_sample_of_the_demo() -> None:
    sample = Datasets().get("demo").sample("calc-1")
    commands = [f"patch -p1 <<'END'\n{sample.patch}END", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    model = DeterministicModel(outputs=[make_output("I act.", [{"command": command}]) for command in commands])
    with SyncSession.for_sample("demo", "calc-1") as session:
        agent = DefaultAgent(
            model, CarrelEnvironment(session), system_template="Solve the task.", instance_template="{{task}}"
        )
        assert agent.run(sample.problem_statement)["exit_status"] == "Submitted"
        assert session.verify().outcome == "solved"
