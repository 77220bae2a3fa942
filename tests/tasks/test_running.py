"""Many samples and one agent: results a line each, gone on with after a stop, counted."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carrel.errors import ConfigurationError, ResultsRefused
from carrel.execution.config import Mount
from carrel.tasks.runner import Agent, ResultsFile, TaskResult, run_samples
from carrel.tasks.sample import Sample
from carrel.wire.verification import VerificationResult
from tests.tasks.small_samples import SOLVE, calc

SOLVER = Agent(command=SOLVE, timeout=60)


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    return [calc(tmp_path / f"calc-{n}", sample_id=f"calc-{n}", dataset="sums") for n in range(3)]


def lines(file: Path) -> list[TaskResult]:
    return [TaskResult.model_validate_json(line) for line in file.read_text().splitlines()]


async def test_each_sample_is_worked_on_and_judged(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    output, heard = tmp_path / "out" / "results.jsonl", []
    total = await run_samples(
        samples, SOLVER, output, workers=2, cache=cache, keep=tmp_path / "kept", done=heard.append
    )
    assert (total.samples, total.solved, total.pass_rate, total.outcomes) == (3, 3, 1.0, {"solved": 3})
    assert {result.sample_id for result in lines(output)} == {"calc-0", "calc-1", "calc-2"}
    assert [result.sample_id for result in lines(output)] == [result.sample_id for result in heard]
    first = lines(output)[0]
    assert (first.dataset, first.agent, first.agent_exit_code) == ("sums", SOLVE, 0)
    assert "+    return a + b" in first.patch
    kept = sorted(path.name for path in (tmp_path / "kept" / "sums" / "calc-0").iterdir())
    assert kept == ["agent-stderr.txt", "agent-stdout.txt", "patch.txt", "report-1.txt", "stderr-1.txt", "stdout-1.txt"]


async def test_the_agent_is_told_its_problem_and_not_the_solution(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    look = (
        'cat "$CARREL_PROBLEM_FILE"; echo; echo "$CARREL_PROBLEM|$CARREL_SAMPLE_ID|$CARREL_DATASET|$KEY"; cat /given/x'
    )
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "x").write_text("given")
    agent = Agent(command=look, env={"KEY": "secret"}, mounts=(Mount(source=tmp_path / "given", at="/given"),))
    await run_samples(samples[:1], agent, tmp_path / "r.jsonl", cache=cache)
    told = lines(tmp_path / "r.jsonl")[0]
    assert told.agent_stdout == "add() subtracts.\nadd() subtracts.|calc-0|sums|secret\ngiven"
    assert told.patch == ""
    assert told.result.outcome == "not_solved"


async def test_an_agent_that_fails_crashes_or_takes_too_long_is_judged_all_the_same(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    slow = Agent(command=f"{SOLVE}; sleep 1000", timeout=4)
    await run_samples(samples[:1], slow, tmp_path / "slow.jsonl", cache=cache)
    told = lines(tmp_path / "slow.jsonl")[0]
    assert (told.agent_timed_out, told.agent_exit_code, told.result.outcome) == (True, 124, "solved")
    broken = Agent(command=f"{SOLVE}; echo no >&2; kill -9 $PPID; exit 3", timeout=60)
    await run_samples(samples[:1], broken, tmp_path / "broken.jsonl", cache=cache)
    told = lines(tmp_path / "broken.jsonl")[0]
    assert told.agent_exit_code != 0
    assert told.result.outcome == "solved", told


async def test_a_broken_agent_is_not_a_wrong_answer(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    async def status(command: str) -> str:
        output = tmp_path / f"{command.split()[0].strip('./')}.jsonl"
        total = await run_samples(samples[:1], Agent(command=command, timeout=60), output, cache=cache)
        (line,) = lines(output)
        assert total.could_not_run == (line.agent_status == "could_not_run")
        assert total.changed_nothing == (line.agent_status == "changed_nothing")
        return f"{line.agent_status} {line.agent_exit_code} {line.result.outcome}"

    assert await status("./nope.sh") == "could_not_run 127 not_solved"
    assert await status("./calc.py") == "could_not_run 126 not_solved"
    assert await status("true") == "changed_nothing 0 not_solved"
    assert await status("echo '# a thought' >> calc.py") == "worked 0 not_solved"
    assert await status(f"{SOLVE}; no-such-program") == "worked 127 solved"


async def test_an_agent_that_could_not_be_run_is_tried_again(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    output, agent = tmp_path / "r.jsonl", tmp_path / "agent"
    agent.mkdir()
    solver = Agent(command="/agent/run", timeout=60, mounts=(Mount(source=agent, at="/agent"),))
    total = await run_samples(samples[:1], solver, output, cache=cache)
    assert (total.solved, total.could_not_run) == (0, 1)
    (agent / "run").write_text(f"#!/bin/sh\n{SOLVE}\n")
    (agent / "run").chmod(0o755)
    total = await run_samples(samples[:1], solver, output, resume=True, cache=cache)
    assert (total.solved, total.could_not_run) == (1, 0)


async def test_a_sample_that_cannot_be_made_ready_costs_itself_only(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    samples[1].environment.setup = ["exit 9"]
    output = tmp_path / "r.jsonl"
    total = await run_samples(samples, SOLVER, output, cache=cache)
    assert total.outcomes == {"solved": 2, "infrastructure_failed": 1}
    assert (total.judged, total.pass_rate) == (2, 1.0)
    samples[1].environment.setup = []
    heard: list[TaskResult] = []
    total = await run_samples(samples, SOLVER, output, resume=True, cache=cache, done=heard.append)
    assert [result.sample_id for result in heard] == ["calc-1"]
    assert total.outcomes == {"solved": 3}


async def test_what_is_done_is_not_done_again(samples: list[Sample], tmp_path: Path, cache: Path) -> None:
    output = tmp_path / "r.jsonl"
    await run_samples(samples[:2], SOLVER, output, cache=cache)
    with pytest.raises(ResultsRefused, match="--resume goes on"):
        await run_samples(samples, SOLVER, output, cache=cache)
    with output.open("a") as file:
        file.write('{"dataset": "sums", "sample_id": "calc-2", "ag')
    heard: list[TaskResult] = []
    total = await run_samples(samples, SOLVER, output, resume=True, cache=cache, done=heard.append)
    assert [result.sample_id for result in heard] == ["calc-2"]
    assert (total.samples, len(lines(output))) == (3, 3)
    assert (tmp_path / "r.jsonl.torn").read_text().startswith('{"dataset"')


async def test_results_that_are_not_this_runs_are_left_alone(
    samples: list[Sample], tmp_path: Path, cache: Path
) -> None:
    output = tmp_path / "r.jsonl"
    await run_samples(samples[:1], SOLVER, output, cache=cache)
    before = output.read_bytes()
    with pytest.raises(ResultsRefused, match="line 1: of another agent"):
        await run_samples(samples, Agent(command="true"), output, resume=True, cache=cache)
    assert output.read_bytes() == before
    output.write_text('{"some": "thing"}\n')
    with pytest.raises(ResultsRefused, match="line 1: no result of a run: dataset"):
        await run_samples(samples, SOLVER, output, resume=True, cache=cache)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from carrel.tasks.runner import Agent, run_samples
from tests.tasks.small_samples import SOLVE, calc

folder = Path(sys.argv[1])
samples = [calc(folder / f"calc-{n}", sample_id=f"calc-{n}", dataset="sums") for n in range(5)]
agent = Agent(command=SOLVE, timeout=60)
asyncio.run(run_samples(samples, agent, folder / "r.jsonl", workers=2, resume=True, cache=folder / "cache"))
"""


def test_killed_and_started_again_it_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    house = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(house)}
    command = [sys.executable, str(program), str(tmp_path)]
    output = tmp_path / "r.jsonl"
    process = subprocess.Popen(command, env=env)
    deadline = time.monotonic() + 60
    while (not output.exists() or output.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    # A second one that writes to the same file is refused.
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    done = output.read_bytes().count(b"\n")
    if done < 5:
        assert "another run is writing" in second.stderr
    subprocess.run(command, env=env, check=True, timeout=100)
    assert sorted(json.loads(line)["sample_id"] for line in output.read_text().splitlines()) == [
        f"calc-{n}" for n in range(5)
    ]


def test_an_agent_is_not_given_less_than_no_time() -> None:
    with pytest.raises(ConfigurationError, match="the agent's timeout is -1; it is a number of seconds"):
        Agent(command="true", timeout=-1)


def test_a_result_that_could_not_be_written_whole_leaves_nothing_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    told = [
        TaskResult(dataset="d", sample_id=name, agent="a", started_at="", result=VerificationResult())
        for name in ("one", "two", "three")
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultsFile(path, "a", resume=False) as results:
        results.add(told[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                results.add(told[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        results.add(told[2])
    with ResultsFile(path, "a", resume=True) as results:
        assert [name for _, name, _ in results.earlier] == ["one", "three"]
