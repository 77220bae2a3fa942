"""A dataset's folder is read whole, or refused by file, line and field."""

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ConfigurationError, DatasetInvalid, DatasetNotFound, SampleNotFound
from carrel.execution.config import Limits
from carrel.tasks.dataset import DEMO, Dataset, Datasets, merged
from carrel.tasks.sample import Sample


def written(folder: Path, *samples: dict[str, Any] | str, settings: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [sample if isinstance(sample, str) else json.dumps(sample) for sample in samples]
    (folder / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if settings is not None:
        (folder / "dataset.yaml").write_text(settings)
    return folder


def test_a_sample_needs_nothing_but_its_id(tmp_path: Path) -> None:
    dataset = Dataset.load(written(tmp_path / "small", {"sample_id": "a-1"}))
    (sample,) = dataset.samples
    assert (dataset.name, dataset.description) == ("small", "")
    assert (sample.sample_id, sample.instance_id, sample.dataset) == ("a-1", "a-1", "small")
    assert (sample.version, sample.latest, sample.verifier) == (1, True, "test_suite")
    assert (sample.problem_statement, sample.fail_to_pass, sample.files) == ("", [], None)
    assert (sample.environment.workdir, sample.environment.network) == ("/workspace", False)
    assert dataset.info.sample_count == 1
    assert (datetime.now(UTC) - dataset.created_at).total_seconds() < 3600


def test_what_holds_for_all_is_overridden_key_by_key(tmp_path: Path) -> None:
    settings = """
name: demo
description: Small repairs
environment:
  {backend: sandbox, workdir: /workspace, deps: [pytest], setup: [make], env: {A: one, B: two}, limits: {memory: 1GiB}}
verify: {command: "python -m pytest -q --junitxml={report}", timeout: 300, retries: 0}
"""
    own = {
        "environment": {"deps": ["tox"], "env": {"B": "three"}, "limits": {"cpus": 2, "disk": None}},
        "verify": {"retries": 2},
    }
    dataset = Dataset.load(written(tmp_path / "d", {"sample_id": "a"}, {"sample_id": "b", **own}, settings=settings))
    a, b = dataset.samples
    assert (a.environment.deps, a.environment.env) == (["pytest"], {"A": "one", "B": "two"})
    assert a.environment.limits.limits().memory == 1 << 30
    assert (b.environment.deps, b.environment.setup) == (["tox"], ["make"])
    assert b.environment.env == {"A": "one", "B": "three"}
    assert (b.environment.limits.memory, b.environment.limits.cpus) == (1 << 30, 2)
    assert (a.verify.retries, b.verify.retries, b.verify.timeout) == (0, 2, 300)
    assert b.verify.command == a.verify.command
    assert dataset.name == "demo"
    assert a.dataset == "demo"


DOUBLED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 60))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("environment: &a {env: *a}", "line 1: an alias contains itself"),
        ("name: x\nverify: &v\n  protected: [*v]\n", "line 2: an alias contains itself"),
        (f"description: x\n{DOUBLED}", "its aliases stand for more than 10,000 values"),
        (f"description: x\n{MERGED}", "its aliases stand for more than 10,000 values"),
        ("[" * 600 + "]" * 600, "it is nested too deeply"),
        ("created_at: 2026-13-45", "line 1: created_at: "),
        (f"verify: {{timeout: {'9' * 5000}}}", "a value cannot be read"),
        (f"verify: {{retries: 0x{'f' * 5000}}}", "verify.retries"),
    ],
    ids=["recursive", "recursive list", "doubled", "merged", "deep", "date", "digits", "hexadecimal"],
)
def test_one_bad_definition_affects_only_its_dataset(tmp_path: Path, settings: str, reason: str) -> None:
    written(tmp_path / "bad", {"sample_id": "a"}, settings=settings)
    written(tmp_path / "good", {"sample_id": "b"}, settings="environment: &e {env: {A: x}}\nverify: {}")
    datasets = Datasets(tmp_path)
    assert [each.name for each in datasets.list()] == ["good"]
    with pytest.raises(DatasetInvalid, match=re.escape(f"{tmp_path}/bad/dataset.yaml")) as refused:
        datasets.get("bad")
    assert reason in str(refused.value)


def test_aliases_may_be_used_again(tmp_path: Path) -> None:
    settings = "environment: {env: &e {A: one}, setup: &s [make]}\nverify: {protected: *s}\ndescription: &d text"
    [sample] = Dataset.load(written(tmp_path / "d", {"sample_id": "a"}, settings=settings)).samples
    assert (sample.environment.setup, sample.verify.protected) == (["make"], ["make"])


def test_merging_goes_into_maps_and_replaces_lists() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": []}) == {"a": {"b": 1, "c": 3}, "d": []}


def test_a_missing_value_may_be_written_as_null_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", {"sample_id": "a", "patch": None, "environment": None}, "", "  ")
    assert Dataset.load(folder).sample("a").patch == ""


def test_fields_of_ones_own_are_kept(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", {"sample_id": "a", "difficulty": "easy"})
    assert Dataset.load(folder).sample("a").model_dump()["difficulty"] == "easy"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a sample is a JSON object, not list"),
        ("{}", "line 2: sample_id: missing"),
        ({"sample_id": "../x"}, r"line 2 \(../x\): sample_id: '../x' is not a plain name"),
        ({"sample_id": ""}, "line 2: sample_id: '' is not a plain name"),
        ({"sample_id": "b", "fail_to_pass": "t"}, r"line 2 \(b\): fail_to_pass: .*list, not 't'"),
        ({"sample_id": "b", "version": 0}, "version: .*greater than or equal to 1"),
        ({"sample_id": "b", "verifier": "vibes"}, "verifier: .*'test_suite'"),
        ({"sample_id": "b", "fail_to_pas": []}, "no field 'fail_to_pas'; did you mean 'fail_to_pass'"),
        ({"sample_id": "b", "FAIL_TO_PASS": "[]"}, "no field 'FAIL_TO_PASS'; did you mean 'fail_to_pass'"),
        ({"sample_id": "b", "environment": {"dep": ["x"]}}, "environment.dep: unknown field"),
        ({"sample_id": "b", "environment": []}, "environment: "),
        ({"sample_id": "b", "environment": {"workdir": "work"}}, "environment.workdir: the workdir is an absolute"),
        ({"sample_id": "b", "environment": {"workdir": "/a/../../etc"}}, "environment.workdir"),
        ({"sample_id": "b", "environment": {"limits": {"memory": "lots"}}}, "environment.limits.memory: 'lots' is no"),
        ({"sample_id": "b", "verify": {"timeout": -1}}, "verify.timeout: .*greater than 0"),
        ({"sample_id": "b", "files": "/etc"}, "files: '/etc' is not inside the dataset"),
        ({"sample_id": "b", "files": "x/../../y"}, "files: 'x/../../y' is not inside the dataset"),
        ({"sample_id": "b", "files": "."}, "files: '.' is not inside the dataset"),
        ({"sample_id": "b", "files": "samples.jsonl"}, "is the dataset itself"),
        ({"sample_id": "a"}, "line 2: sample_id: 'a' in version 1 is on line 1 already"),
    ],
)
def test_a_wrong_line_is_reported_by_file_line_and_field(line: Any, complaint: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "d", {"sample_id": "a"}, line)
    with pytest.raises(DatasetInvalid, match=complaint) as refused:
        Dataset.load(folder)
    assert str(refused.value).startswith(f"{folder}/samples.jsonl, line 2")
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ConfigurationError)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("name: [", "line 1: this is not valid YAML: the bracket"),
        ("- name", "line 1: expected a mapping"),
        ("name: x\nverfiy: {}\n", "line 2: verfiy: unknown field"),
        (
            "name: x\nenvironment:\n  network: false\n  limits: {memory: 12 apples}\n",
            "line 4: environment.limits.memory",
        ),
        ("verify:\n  timeout: soon\n", "line 2: verify.timeout: .*not 'soon'"),
        ("environment:\n  deps:\n    - pytest\n    - 3\n", "line 4: environment.deps.1: .*not 3"),
        ("name: a/b\n", "line 1: name: 'a/b' is not a plain name"),
        ("name: a\nname: b\n", "line 2: the key name is in line 1 already"),
        ("verify: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_wrong_settings_are_reported_by_file_line_and_field(settings: str, complaint: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "d", {"sample_id": "a"}, settings=settings)
    with pytest.raises(DatasetInvalid, match=complaint) as refused:
        Dataset.load(folder)
    assert str(refused.value).startswith(f"{folder}/dataset.yaml")


def test_settings_that_are_no_text_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", {"sample_id": "a"})
    (folder / "dataset.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(DatasetInvalid, match="UTF-8"):
        Dataset.load(folder)


def test_versions_of_a_sample(tmp_path: Path) -> None:
    lines = [{"sample_id": "a", "version": number, "patch": f"p{number}"} for number in (2, 1, 3)]
    dataset = Dataset.load(written(tmp_path / "d", *lines, {"sample_id": "b"}))
    assert [(sample.sample_id, sample.version) for sample in dataset.samples] == [("a", 3), ("b", 1)]
    assert dataset.sample("a").patch == "p3"
    assert dataset.sample("a", 1).patch == "p1"
    assert [sample.latest for sample in dataset.versions] == [False, False, True, True]
    with pytest.raises(SampleNotFound, match="has no version 9; it has 2, 1, 3"):
        dataset.sample("a", 9)


def test_an_unknown_name_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    datasets = Datasets(tmp_path)
    assert (datasets.names(), datasets.list()) == ([], [])
    written(tmp_path / "birds", {"sample_id": "wren-1"}, {"sample_id": "wren-2"})
    (tmp_path / "no-dataset").mkdir()
    with pytest.raises(DatasetNotFound, match=r"no dataset 'bird' in .*; there is: birds"):
        datasets.get("bird")
    with pytest.raises(KeyError, match="did you mean wren"):
        datasets.get("birds").sample("wren-3")
    with pytest.raises(DatasetNotFound):
        datasets.get("../birds")
    with pytest.raises(DatasetInvalid, match=r"no samples\.jsonl"):
        Dataset.load(tmp_path / "no-dataset")
    with pytest.raises(DatasetNotFound):
        Dataset.load(tmp_path / "nothing")


def test_among_others_a_dataset_has_the_name_of_its_folder(tmp_path: Path) -> None:
    written(tmp_path / "birds", {"sample_id": "a"}, settings="name: fowl\n")
    assert Dataset.load(tmp_path / "birds").name == "fowl"
    found = Datasets(tmp_path).get("birds")
    assert (found.name, found.info.name, found.sample("a").dataset) == ("birds", "birds", "birds")


def test_a_dataset_that_changes_is_read_again(tmp_path: Path) -> None:
    datasets = Datasets(tmp_path)
    written(tmp_path / "d", {"sample_id": "a"})
    first = datasets.get("d")
    assert datasets.get("d") is first
    written(tmp_path / "d", {"sample_id": "a"}, {"sample_id": "b"})
    assert [sample.sample_id for sample in datasets.get("d").samples] == ["a", "b"]


def test_the_demo_is_there_unless_the_folder_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARREL_HOME", str(tmp_path))
    assert Datasets().names() == ["demo"]
    assert Datasets(tmp_path / "datasets").names() == []
    assert Datasets().get("demo").folder == DEMO
    written(tmp_path / "datasets" / "demo", {"sample_id": "mine"})
    assert Datasets().get("demo").sample("mine")


def test_the_demo_has_samples_in_several_languages() -> None:
    demo = Dataset.load(DEMO)
    languages = [sample.language for sample in demo.samples]
    assert sorted(languages) == ["c", "javascript", "python", "python", "python", "shell"]
    for sample in demo.samples:
        assert sample.fail_to_pass, sample.sample_id
        assert sample.pass_to_pass, sample.sample_id
        assert sample.patch.startswith("diff --git"), sample.sample_id
        assert sample.test_patch.startswith("diff --git"), sample.sample_id
        assert sample.problem_statement.strip(), sample.sample_id
        assert sample.files is not None
        assert os.path.isdir(sample.files)
        assert (sample.environment.deps, sample.environment.network) == ([], False), "the demo works offline"


def test_programs_that_the_machine_lacks_are_named() -> None:
    sample = Sample.model_validate({"sample_id": "a", "environment": {"programs": ["sh", "no-such-program"]}})
    assert sample.environment.missing() == ["no-such-program"]


def test_the_demo_needs_no_limit_that_an_ordinary_user_cannot_set() -> None:
    samples = Datasets(demo=True).get("demo").samples
    assert {sample.environment.limits.limits() for sample in samples} == {Limits()}
