"""Many samples and one agent: one line per attempt in the folder of the run, resumed after a stop, counted."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ConfigurationError, ResultsRefused
from carrel.execution.config import Mount
from carrel.tasks.run_folder import RunFolder, RunInfo, TaskResult
from carrel.tasks.runner import Agent, AgentOutcome, TaskSession, local_sessions, run_samples
from carrel.tasks.sample import Sample
from carrel.tasks.stats import Summary
from carrel.wire.verification import VerificationResult
from tests.support.samples import SOLVE, calc

SOLVER = Agent(command=SOLVE, timeout=60)


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    return [calc(tmp_path / f"calc-{n}", sample_id=f"calc-{n}", dataset="sums") for n in range(3)]


async def run(samples: list[Sample], agent: Agent, folder: Path, cache: Path, **more: Any) -> Summary:
    return await run_samples(samples, agent, local_sessions(agent, cache), folder, **more)


def lines(folder: Path) -> list[TaskResult]:
    return [TaskResult.model_validate_json(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def info(folder: Path) -> RunInfo:
    return RunInfo.model_validate_json((folder / "run.json").read_text())


async def test_each_sample_is_worked_on_and_judged(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    folder, heard = tmp_path / "runs" / "sums", list[Any]()
    total = await run(samples, SOLVER, folder, cache, workers=2, on_result=heard.append)
    assert (total.samples, total.solved, total.pass_rate, total.outcomes) == (3, 3, 1.0, {"solved": 3})
    assert {result.sample_id for result in lines(folder)} == {"calc-0", "calc-1", "calc-2"}
    assert [result.sample_id for result in lines(folder)] == [result.sample_id for result in heard]
    first = lines(folder)[0]
    assert (first.dataset, first.attempt, first.agent.exit_code, first.tokens) == ("sums", 1, 0, None)
    assert (first.outcome, first.is_success, first.score, first.integrity) == ("solved", True, 1.0, "clean")
    assert (first.verdict.outcome, bool(first.session_id)) == ("solved", True)
    assert "+    return a + b" in (folder / "agents" / "calc-0-1" / "patch.diff").read_text()
    about = info(folder)
    assert (about.dataset, about.agent, about.attempts, about.samples) == (
        "sums",
        SOLVE,
        1,
        ["calc-0", "calc-1", "calc-2"],
    )
    assert about.summary == total
    assert about.finished_at is not None


async def test_a_line_has_the_documented_fields(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    agent = Agent(command=f'{SOLVE}; echo 1234 > "$CARREL_TOKENS_FILE"')
    await run(samples[:1], agent, tmp_path / "run", cache)
    line = json.loads((tmp_path / "run" / "results.jsonl").read_text())
    wanted = "dataset sample_id attempt session_id outcome is_success score integrity agent tokens started_at verdict"
    assert set(wanted.split()) <= line.keys()
    assert {"exit_code", "timed_out", "seconds"} <= line["agent"].keys()
    assert line["tokens"] == 1234


async def test_several_attempts_at_each_sample(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    class Second:
        """Solves a sample in its second attempt."""

        command = "every second time"

        def __init__(self) -> None:
            self.seen: list[str] = []

        async def solve(self, session: TaskSession, sample: Sample) -> AgentOutcome:
            self.seen.append(sample.sample_id)
            if self.seen.count(sample.sample_id) == 2:
                await session.execute_command(SOLVE)
            return AgentOutcome(exit_code=0, stdout=f"attempt {self.seen.count(sample.sample_id)}")

    opened = local_sessions(SOLVER, cache)
    total = await run_samples(samples[:2], Second(), opened, tmp_path / "run", attempts=2, workers=2)
    assert (total.samples, total.attempts, total.solved, total.changed_nothing) == (2, 4, 2, 2)
    assert {k: rate.rate for k, rate in total.pass_at.items()} == {1: 0.5, 2: 1.0}
    results = lines(tmp_path / "run")
    assert {(result.sample_id, result.attempt, result.outcome) for result in results} == {
        (f"calc-{sample}", attempt, outcome)
        for sample in (0, 1)
        for attempt, outcome in ((1, "not_solved"), (2, "solved"))
    }
    assert len({result.session_id for result in results}) == 4
    assert (tmp_path / "run" / "agents" / "calc-1-2" / "stdout.txt").read_text() == "attempt 2"


async def test_the_agent_gets_the_problem_and_not_the_solution(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    look = (
        'cat "$CARREL_PROBLEM_FILE"; echo; echo "$CARREL_PROBLEM|$CARREL_SAMPLE_ID|$CARREL_DATASET|$KEY"; cat /given/x'
    )
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "x").write_text("given")
    agent = Agent(command=look, env={"KEY": "secret"}, mounts=(Mount(source=tmp_path / "given", at="/given"),))
    await run(samples[:1], agent, tmp_path / "run", cache)
    folder = tmp_path / "run" / "agents" / "calc-0-1"
    assert (folder / "stdout.txt").read_text() == "add() subtracts.\nadd() subtracts.|calc-0|sums|secret\ngiven"
    assert (folder / "patch.diff").read_text() == ""
    assert lines(tmp_path / "run")[0].outcome == "not_solved"


async def test_a_long_problem_arrives_whole(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    samples[0].problem_statement = "'ä\"$(x)`" * 40_000
    agent = Agent(command='cat "$CARREL_PROBLEM_FILE"; printf %s "$CARREL_PROBLEM" | wc -c >&2')
    await run(samples[:1], agent, tmp_path / "run", cache)
    folder = tmp_path / "run" / "agents" / "calc-0-1"
    assert (folder / "stdout.txt").read_text() == samples[0].problem_statement
    assert int((folder / "stderr.txt").read_text()) > 99_000


async def test_an_agent_that_fails_crashes_or_takes_too_long_is_judged_all_the_same(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    slow = Agent(command=f"{SOLVE}; sleep 1000", timeout=4)
    await run(samples[:1], slow, tmp_path / "slow", cache)
    result = lines(tmp_path / "slow")[0]
    assert (result.agent.timed_out, result.agent.exit_code, result.outcome) == (True, 124, "solved")
    broken = Agent(command=f"{SOLVE}; echo no >&2; kill -9 $PPID; exit 3", timeout=60)
    await run(samples[:1], broken, tmp_path / "broken", cache)
    result = lines(tmp_path / "broken")[0]
    assert result.agent.exit_code != 0
    assert result.outcome == "solved", result


async def test_a_broken_agent_is_not_a_wrong_answer(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    async def status(command: str) -> str:
        folder = tmp_path / command.split()[0].strip("./")
        total = await run(samples[:1], Agent(command=command, timeout=60), folder, cache)
        (line,) = lines(folder)
        assert total.could_not_run == (line.agent.status == "could_not_run")
        assert total.changed_nothing == (line.agent.status == "changed_nothing")
        return f"{line.agent.status} {line.agent.exit_code} {line.outcome}"

    assert await status("./nope.sh") == "could_not_run 127 not_solved"
    assert await status("./calc.py") == "could_not_run 126 not_solved"
    assert await status("true") == "changed_nothing 0 not_solved"
    assert await status("echo '# a thought' >> calc.py") == "worked 0 not_solved"
    assert await status(f"{SOLVE}; no-such-program") == "worked 127 solved"


async def test_an_agent_that_could_not_be_run_is_tried_again(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    folder, agent = tmp_path / "run", tmp_path / "agent"
    agent.mkdir()
    solver = Agent(command="/agent/run", timeout=60, mounts=(Mount(source=agent, at="/agent"),))
    total = await run(samples[:1], solver, folder, cache)
    assert (total.solved, total.could_not_run) == (0, 1)
    (agent / "run").write_text(f"#!/bin/sh\n{SOLVE}\n")
    (agent / "run").chmod(0o755)
    total = await run(samples[:1], solver, folder, cache, resume=True)
    assert (total.solved, total.could_not_run) == (1, 0)


async def test_a_sample_that_cannot_be_prepared_costs_only_itself(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    samples[1].environment.setup = ["exit 9"]
    folder = tmp_path / "run"
    total = await run(samples, SOLVER, folder, cache)
    assert total.outcomes == {"solved": 2, "infrastructure_failed": 1}
    assert (total.judged, total.pass_rate) == (2, 1.0)
    samples[1].environment.setup = []
    heard: list[TaskResult] = []
    total = await run(samples, SOLVER, folder, cache, resume=True, on_result=heard.append)
    assert [result.sample_id for result in heard] == ["calc-1"]
    assert total.outcomes == {"solved": 3}


async def test_finished_attempts_are_not_made_again(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "run"
    await run(samples[:2], SOLVER, folder, cache)
    with pytest.raises(ResultsRefused, match="continue them with --resume"):
        await run(samples, SOLVER, folder, cache)
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"dataset": "sums", "sample_id": "calc-2", "ag')
    assert len(RunFolder(folder).read_results()) == 2
    heard: list[TaskResult] = []
    total = await run(samples, SOLVER, folder, cache, resume=True, on_result=heard.append)
    assert [result.sample_id for result in heard] == ["calc-2"]
    assert (total.samples, len(lines(folder))) == (3, 3)
    assert (folder / "results.jsonl.torn").read_text().startswith('{"dataset"')


async def test_the_folder_of_another_run_is_left_alone(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "run"
    await run(samples[:1], SOLVER, folder, cache)
    before = (folder / "results.jsonl").read_bytes()
    with pytest.raises(ResultsRefused, match="a run of another agent"):
        await run(samples, Agent(command="true"), folder, cache, resume=True)
    assert (folder / "results.jsonl").read_bytes() == before
    (folder / "results.jsonl").write_text('{"some": "thing"}\n')
    with pytest.raises(ResultsRefused, match="line 1: not a result of a run: dataset"):
        await run(samples, SOLVER, folder, cache, resume=True)
    (folder / "run.json").unlink()
    with pytest.raises(ResultsRefused, match=r"not the folder of a run: it has no run\.json"):
        await run(samples, SOLVER, folder, cache, resume=True)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from carrel.tasks.runner import Agent, local_sessions, run_samples
from tests.support.samples import SOLVE, calc

folder = Path(sys.argv[1])
samples = [calc(folder / f"calc-{n}", sample_id=f"calc-{n}", dataset="sums") for n in range(5)]
agent = Agent(command=SOLVE, timeout=60)
open_session = local_sessions(agent, folder / "cache")
asyncio.run(run_samples(samples, agent, open_session, folder / "run", workers=2, resume=True))
"""


def test_killed_and_started_again_it_continues(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(program), str(tmp_path)]
    output = tmp_path / "run" / "results.jsonl"
    process = subprocess.Popen(command, env=env)
    deadline = time.monotonic() + 60
    while (not output.exists() or output.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    # A second one that writes to the same folder is refused.
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    done = output.read_bytes().count(b"\n")
    if done < 5:
        assert "another process is writing" in second.stderr
    subprocess.run(command, env=env, check=True, timeout=100)
    assert sorted(json.loads(line)["sample_id"] for line in output.read_text().splitlines()) == [
        f"calc-{n}" for n in range(5)
    ]


def test_an_agent_has_no_negative_timeout() -> None:
    with pytest.raises(ConfigurationError, match="the agent's timeout is -1; it is a number of seconds"):
        Agent(command="true", timeout=-1)


def test_a_result_that_could_not_be_written_whole_leaves_nothing_in_the_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    results = [
        TaskResult(dataset="d", sample_id=name, started_at=datetime.now(UTC), verdict=VerificationResult())
        for name in ("one", "two", "three")
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with folder:
        folder.add(results[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (folder.results_file.stat().st_size + 10, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                folder.add(results[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        folder.add(results[2])
    assert [result.sample_id for result in folder.read_results()] == ["one", "three"]


def test_runs_of_the_same_second_have_different_folders(tmp_path: Path) -> None:
    paths = [RunFolder.new(tmp_path / "runs", "demo").path for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.name.startswith("demo-2") for path in paths)
