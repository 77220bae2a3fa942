"""Checking a dataset: the demo is right, and each fault is reported in words."""

import asyncio
from pathlib import Path

import pytest

from carrel.tasks.dataset import DEMO, Dataset
from carrel.tasks.dataset_check import CheckResult, check, check_sample, faults_of
from carrel.tasks.runner import in_parallel
from carrel.tasks.sample import Sample
from carrel.wire.verification import Outcome, Standing, VerificationResult


def calc(**changes: object) -> Sample:
    return Dataset.load(DEMO).sample("calc-1").model_copy(update=changes)


def came_to(outcome: Outcome, suite_ran: bool = True, **required: Standing) -> VerificationResult:
    return VerificationResult(
        outcome=outcome, suite_ran=suite_ran, is_success=outcome in ("solved", "flaky"), required=required
    )


def sample(fails: list[str], passes: list[str], patch: str = "p") -> Sample:
    return Sample(sample_id="a", fail_to_pass=fails, pass_to_pass=passes, patch=patch)


SOLVED = came_to("solved", a="passed", b="passed")


def test_a_sample_that_is_right_has_no_faults() -> None:
    assert faults_of(sample(["a"], ["b"]), came_to("not_solved", a="failed", b="passed"), SOLVED) == []
    assert faults_of(sample(["a"], ["b"]), came_to("not_solved", a="missing", b="passed"), SOLVED) == []
    assert faults_of(sample(["a"], []), came_to("tests_did_not_run", suite_ran=False), SOLVED) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (came_to("solved", a="passed", b="passed"), SOLVED, "in fail_to_pass, and passes without the patch: a"),
        (came_to("not_solved", a="failed", b="failed"), SOLVED, "in pass_to_pass, and fails without the patch: b"),
        (
            came_to("not_solved", a="failed", b="missing"),
            SOLVED,
            "in pass_to_pass, and is not run without the patch: b",
        ),
        (
            came_to("not_solved", a="failed", b="passed"),
            came_to("not_solved", a="skipped", b="passed"),
            "in fail_to_pass, and is skipped with the patch: a",
        ),
        (
            came_to("not_solved", a="failed", b="passed"),
            came_to("partly", a="passed", b="failed"),
            "in pass_to_pass, and fails with the patch: b",
        ),
        (
            came_to("not_solved", a="failed", b="passed"),
            came_to("tests_did_not_run", suite_ran=False),
            "with the patch the tests do not run: there is no report",
        ),
        (
            came_to("not_solved", a="failed", b="passed"),
            came_to("flaky", a="passed", b="passed"),
            "with the patch it passes only sometimes: see its output",
        ),
    ],
)
def test_each_fault_is_reported(before: VerificationResult, after: VerificationResult, fault: str) -> None:
    assert faults_of(sample(["a"], ["b"]), before, after) == [fault]


def test_missing_parts_of_a_sample_are_reported() -> None:
    before = came_to("not_solved", a="failed", b="passed")
    assert faults_of(sample(["a"], ["b"], patch=" \n"), before, SOLVED) == [
        "it has no patch, so it is unknown whether it can be solved"
    ]
    assert faults_of(sample([], ["b"]), came_to("solved", b="passed"), came_to("solved", b="passed")) == [
        "it has no fail_to_pass: it counts as solved without any change"
    ]
    assert "in fail_to_pass and in pass_to_pass: a" in faults_of(sample(["a"], ["a"]), before, SOLVED)


def test_without_lists_all_tests_count() -> None:
    bare = sample([], [])
    assert faults_of(bare, came_to("not_solved"), came_to("solved")) == []
    assert faults_of(bare, came_to("solved"), came_to("not_solved")) == [
        "it is solved without the patch",
        "it is not solved with the patch: not_solved",
    ]


def test_an_infrastructure_failure_is_reported_once() -> None:
    broken = VerificationResult(outcome="infrastructure_failed", evidence=["no room"])
    assert faults_of(sample(["a"], []), broken, broken) == ["it could not be judged: no room"]


async def test_the_demo_is_right(tmp_path: Path) -> None:
    heard: list[CheckResult] = []
    samples = Dataset.load(DEMO).samples
    findings = await check(samples, cache=tmp_path, on_result=heard.append)
    assert [finding.sample_id for finding in findings] == [sample.sample_id for sample in samples]
    assert {finding.sample_id: finding.faults for finding in findings if finding.faults} == {}
    assert {finding.status for finding in findings} == {"right"}
    assert {finding.before for finding in findings} <= {"not_solved", "partly"}
    assert {finding.after for finding in findings} == {"solved"}
    assert len(heard) == len(samples)


async def test_samples_that_are_wrong_are_found_by_running_them(tmp_path: Path) -> None:
    good = calc()
    name = "tests.test_calc.Calc.test_brackets"
    wrong = {
        "in fail_to_pass, and passes without the patch": calc(fail_to_pass=[*good.fail_to_pass, name], pass_to_pass=[]),
        "in fail_to_pass, and is not run with the patch": calc(fail_to_pass=[*good.fail_to_pass, "no.such.test"]),
        "in pass_to_pass, and fails without the patch": calc(pass_to_pass=[good.fail_to_pass[0]], fail_to_pass=[]),
        "PatchRefused: the patch": calc(patch=good.patch.replace("reader.next_is", "writer.next_is")),
        "test_patch": calc(test_patch=good.test_patch.replace("value(text)", "value(words)")),
        "it has no patch": calc(patch=""),
        "does not exist": calc(files=tmp_path / "nothing"),
        "the tests do not run": calc(verify=good.verify.model_copy(update={"command": "true"})),
        "set-up": calc(environment=good.environment.model_copy(update={"setup": ["echo no luck; exit 3"]})),
    }
    findings = await check(list(wrong.values()), cache=tmp_path / "cache")
    for words, finding in zip(wrong, findings, strict=True):
        assert finding.status == "wrong", words
        assert words in "\n".join(finding.faults), finding.faults


async def test_a_program_that_is_not_here_is_no_fault_of_the_sample() -> None:
    finding = await check_sample(calc(environment=calc().environment.model_copy(update={"programs": ["no-such"]})))
    assert (finding.status, finding.faults) == ("not_checked", ["this machine has no no-such"])


async def test_some_at_a_time_and_the_first_problem_ends_all() -> None:
    now, most = 0, 0

    async def work(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        if number == 13:
            raise LookupError("thirteen")
        return number * 2

    assert await in_parallel(work, range(10), 3) == [number * 2 for number in range(10)]
    assert most == 3
    with pytest.raises(LookupError, match="thirteen"):
        await in_parallel(work, range(20), 3)
