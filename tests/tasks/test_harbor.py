"""Harbor tasks as samples: what is carried over, what is listed, and the same verdict as by their own tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from carrel.cli import app
from carrel.errors import DatasetInvalid, ReportUnreadable
from carrel.tasks.dataset import Dataset
from carrel.tasks.dataset_check import check
from carrel.tasks.environment import open_executor, prepare_sample
from carrel.tasks.importers.harbor import CARRIED, LEFT_OUT, REFUSED, import_harbor
from carrel.tasks.runner import Agent, local_sessions, run_samples
from carrel.tasks.sample import WIRE_FIELDS, Sample
from carrel.tasks.verification.reports import grade_of_rewards
from carrel.tasks.verification.verifier import verify
from tests.support.harbor_tasks import FILES, TOML, harbor_task

MODELS_OF_0_25 = {
    "": (
        "schema_version task metadata verifier agent environment solution source multi_step_reward_strategy steps"
        " artifacts"
    ),
    "verifier": "network_mode allowed_hosts timeout_sec env user environment_mode environment collect",
    "agent": "network_mode allowed_hosts timeout_sec user",
    "solution": "env",
    "environment": (
        "network_mode allowed_hosts build_timeout_sec docker_image os cpus memory_mb storage_mb gpus gpu_types tpu"
        " mcp_servers env skills_dir healthcheck workdir allow_internet"
    ),
}
"""The fields of TaskConfig and its parts in harbor 0.25.0."""


def imported(folder: Path, **options: str) -> tuple[Sample, list[str]]:
    done = import_harbor(folder, folder.parent / "dataset", {}, **options)
    (sample,) = Dataset.load(folder.parent / "dataset").samples
    return sample, [lost.why for lost in done.not_carried_over]


def test_every_field_of_a_task_is_carried_over_or_has_a_reason() -> None:
    paths = {f"{part}.{name}".strip(".") for part, names in MODELS_OF_0_25.items() for name in names.split()}
    known = CARRIED | REFUSED.keys() | LEFT_OUT.keys()
    tables = {"verifier", "agent", "environment", "solution"}
    assert paths - known == tables
    older = {"environment.memory", "environment.storage", "version"}
    assert known - paths == older


def test_what_a_sample_has_of_its_task(tmp_path: Path) -> None:
    sample, lost = imported(harbor_task(tmp_path / "greeting"))
    assert lost == []
    assert (sample.sample_id, sample.instance_id, sample.verifier) == ("greeting", "carrel/greeting", "custom")
    assert sample.problem_statement == FILES["instruction.md"]
    assert (sample.agent_timeout, sample.verify.timeout) == (120, 90)
    environment = sample.environment
    assert (environment.workdir, environment.network, environment.build_timeout) == ("/app", False, 300)
    assert (environment.limits.cpus, environment.limits.memory, environment.limits.disk) == (1, 512 << 20, 64 << 20)
    assert environment.env == {"LANGUAGE": "en"}
    assert sample.model_extra == {
        "harbor": {"metadata": {"difficulty": "easy", "tags": ["files"]}, "not_carried_over": []}
    }
    folder = tmp_path / "dataset" / "files" / "greeting"
    assert environment.dockerfile == folder / "environment" / "Dockerfile"
    assert (sample.verify.tests, sample.solution) == (folder / "tests", folder / "solution")
    assert os.access(folder / "tests" / "test.sh", os.X_OK)
    assert not {"solution", "solve", "agent_timeout", "verify"} & set(WIRE_FIELDS)


def test_what_is_not_carried_over_is_listed(tmp_path: Path) -> None:
    more = TOML.replace('env = { WANTED = "hello world" }', 'env = { KEY = "${SECRET_KEY}" }\nuser = "root"')
    more = more.replace('network_mode = "no-network"', 'network_mode = "allowlist"\nallowed_hosts = ["pypi.org"]')
    more += 'future = 1\n[[environment.mcp_servers]]\nname = "a"\nurl = "http://a"\n'
    more += '[environment.healthcheck]\ncommand = "true"\n'
    test = "#!/bin/sh\napt-get update && apt-get install -y curl\n"
    task = harbor_task(tmp_path / "greeting", task_toml=more, tests_test_sh=test, solution_solve_sh=None)
    sample, lost = imported(task)
    assert not sample.environment.network
    found = {reason.partition(":")[0] for reason in lost}
    assert found == {
        *("verifier.env.KEY", "verifier.user", "environment.allowed_hosts", "environment.mcp_servers"),
        *("environment.healthcheck", "environment.future", "tests/test.sh"),
        "it has no solution/solve.sh, so `carrel datasets check` cannot try whether it can be solved",
    }
    assert sample.model_extra is not None
    assert sample.model_extra["harbor"]["not_carried_over"] == lost
    assert "SECRET_KEY" not in sample.verify.command


def test_older_names_and_defaults(tmp_path: Path) -> None:
    older = '[environment]\nmemory = "2G"\nstorage = "10G"\ndocker_image = "a/b:1"\nworkdir = "/work"\n'
    sample, lost = imported(harbor_task(tmp_path / "greeting", task_toml=older, environment_Dockerfile=None))
    assert lost == []
    assert (sample.environment.image, sample.environment.workdir, sample.environment.network) == (
        "a/b:1",
        "/work",
        True,
    )
    assert (sample.environment.limits.memory, sample.environment.limits.disk) == (2 << 30, 10 << 30)
    assert (sample.verify.timeout, sample.agent_timeout) == (600, None)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"task_toml": "environment = 1"}, "environment is not a table"),
        ({"task_toml": "= 1"}, "task.toml: "),
        ({"task_toml": '[environment]\nos = "Windows"'}, "it needs Windows"),
        ({"task_toml": "[environment]\ngpus = 1"}, "it needs a GPU"),
        ({"task_toml": '[[steps]]\nname = "one"'}, "several steps"),
        ({"task_toml": '[environment]\nmemory = "lots"'}, "'lots' is not a size"),
        ({"tests_test_sh": None}, "it has no tests/test.sh"),
        ({"instruction_md": None}, "it has no instruction.md"),
        ({"environment_Dockerfile": None}, "neither environment/Dockerfile nor"),
        ({"environment_Dockerfile": "FROM scratch\n"}, "give one with --workdir"),
    ],
)
def test_a_task_that_cannot_be_a_sample(changed: dict[str, str | None], complaint: str, tmp_path: Path) -> None:
    harbor_task(tmp_path / "tasks" / "wrong", **changed)
    with pytest.raises(DatasetInvalid, match=complaint):
        import_harbor(tmp_path / "tasks", tmp_path / "dataset", {})
    harbor_task(tmp_path / "tasks" / "right")
    done = import_harbor(tmp_path / "tasks", tmp_path / "dataset", {})
    assert (done.samples, [left.what for left in done.left_out]) == (["right"], ["wrong"])


def test_links_and_services(tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "tasks" / "linked")
    (task / "environment" / "out").symlink_to("/etc/passwd")
    composed = harbor_task(tmp_path / "tasks" / "composed")
    (composed / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    harbor_task(tmp_path / "tasks" / "right")
    done = import_harbor(tmp_path / "tasks", tmp_path / "dataset", {})
    reasons = {left.what: left.why for left in done.left_out}
    assert "leads out of the task" in reasons["linked"]
    assert "single container" in reasons["composed"]
    with pytest.raises(DatasetInvalid, match="there is no Harbor task"):
        import_harbor(tmp_path, tmp_path / "other", {})


@pytest.mark.parametrize(
    ("text", "score", "is_success"),
    [
        ("1\n", 1, True),
        ("0.5", 0.5, False),
        ('{"reward": 1, "speed": 0.2}', 1, True),
        ('{"speed": 0.2}', 0.2, False),
        ("2.5", 1, True),
        ("-1", 0, False),
    ],
)
def test_rewards(text: str, score: float, is_success: bool) -> None:
    grade = grade_of_rewards(text)
    assert (grade.score, grade.is_success) == (score, is_success)


@pytest.mark.parametrize("text", ["", "yes", "NaN", '{"a": 1, "b": 0}', '{"reward": "1"}', "true", "[1]", "1e999"])
def test_rewards_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ReportUnreadable):
        grade_of_rewards(text)


@pytest.mark.real
async def test_a_task_is_checked_solved_and_judged(
    tmp_path: Path, cache: Path, docker_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    sample, _ = imported(harbor_task(tmp_path / "greeting"))
    (finding,) = await check([sample], cache=cache)
    assert (finding.status, finding.before, finding.after) == ("right", "not_solved", "solved"), finding.faults
    prepared = await prepare_sample(sample, cache)
    executor = await open_executor(prepared)
    try:
        seen = await executor.exec("ls / /app; echo 1 > /logs/reward.txt; printf 'hello world' > greeting.txt")
        assert "seed.txt" in seen.stdout
        assert not {"tests", "solution"} & set(seen.stdout.split())
        before = await verify(sample, executor, prepared=prepared)
        assert (before.outcome, before.score, before.details) == ("not_solved", 0, {"reward": 0}), before
        await executor.exec("printf '#!/bin/sh\\n' > greet; chmod +x greet")
        done = await verify(sample, executor, prepared=prepared)
        assert (done.outcome, done.score, done.integrity) == ("solved", 1, "unknown"), done
    finally:
        await executor.close()
    agent = Agent(command="printf 'hello world' > greeting.txt; touch greet; chmod +x greet")
    total = await run_samples([sample], agent, local_sessions(agent, cache), tmp_path / "run")
    assert total.solved == 1


@pytest.mark.real
def test_on_the_command_line(tmp_path: Path, docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    silent = "#!/bin/sh\nexit 3\n"
    harbor_task(tmp_path / "tasks" / "greeting")
    harbor_task(tmp_path / "tasks" / "silent", tests_test_sh=silent, task_toml=TOML + "tpu = { type = 'v6e' }\n")
    base = ["--base", str(tmp_path / "base")]
    run = CliRunner()
    made = run.invoke(app, ["datasets", "import", "--harbor", str(tmp_path / "tasks"), "--name", "mine", *base])
    assert made.exit_code == 0, made.output
    assert "1 sample in" in made.output
    assert "it needs a TPU" in made.output
    assert "images of containers: " in made.stderr
    shown = json.loads(run.invoke(app, ["datasets", "check", "mine", "--json", *base]).stdout)
    assert [finding["status"] for finding in shown] == ["right"]
