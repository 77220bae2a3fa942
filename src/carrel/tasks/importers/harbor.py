"""Make a dataset from Harbor tasks: folders with task.toml, instruction.md, environment/, tests/ and solution/.

Written against the models of harbor 0.25. What a task asks for and carrel has not is listed with the task."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from carrel.errors import DatasetInvalid, NoSamplesMade
from carrel.tasks.dataset import faults
from carrel.tasks.importers.write import (
    ImportResult,
    SkippedItem,
    new_dataset,
    refuse_wrong,
    write_samples,
    write_settings,
)
from carrel.tasks.sample import Sample

TASK, INSTRUCTION, ENVIRONMENT, TESTS, SOLUTION = "task.toml", "instruction.md", "environment", "tests", "solution"
MIB = 1024 * 1024
LOGS = "/logs"
TESTS_AT, SOLUTION_AT = "/tests", "/solution"
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_STAGE = re.compile(r"^\s*FROM\s", re.IGNORECASE | re.MULTILINE)
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_INSTALLS = re.compile(
    r"(?:^|[;&])\s*(?:sudo\s+)?((?:apt-get|apt|apk|yum|dnf)\s+(?:-\S+\s+)*(?:install|add))\b", re.MULTILINE
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])B?", re.IGNORECASE)

CARRIED = {
    *("environment.docker_image", "environment.build_timeout_sec", "environment.cpus", "environment.memory_mb"),
    *("environment.memory", "environment.storage_mb", "environment.storage", "environment.env", "environment.workdir"),
    *("environment.network_mode", "environment.allow_internet", "environment.os", "agent.timeout_sec"),
    *(
        "verifier.timeout_sec",
        "verifier.env",
        "solution.env",
        "metadata",
        "task",
        "schema_version",
        "version",
        "source",
    ),
}
"""Settings of task.toml that a sample has too, or that only describe the task."""
REFUSED = {
    "steps": "it has several steps, and a sample has one",
    "environment.gpus": "it needs a GPU",
    "environment.tpu": "it needs a TPU",
}
"""Settings without which the task would be another one."""
LEFT_OUT = {
    "environment.allowed_hosts": "only the whole network can be allowed; the sessions have none",
    "environment.mcp_servers": "MCP servers are tools of the agent; give them to it yourself",
    "environment.skills_dir": "skills are for the agent; give them to it yourself",
    "environment.healthcheck": "a session starts without waiting for a health check",
    "environment.gpu_types": "there are no GPUs in a session",
    "agent.user": "commands run as user 1000, without capabilities",
    "agent.network_mode": "the network is the same for the agent and the tests, that of [environment]",
    "agent.allowed_hosts": "only the whole network can be allowed",
    "verifier.user": "the tests run as user 1000, without capabilities",
    "verifier.network_mode": "the network is the same for the agent and the tests, that of [environment]",
    "verifier.allowed_hosts": "only the whole network can be allowed",
    "verifier.environment": "the tests run in a fresh container of the sample's own image",
    "verifier.environment_mode": "the tests always run in a fresh container of the sample's own image",
    "verifier.collect": "no command is run after the agent; the files of the work folder are judged",
    "artifacts": "files that the agent leaves outside the work folder are not kept",
    "multi_step_reward_strategy": "a sample has one step",
}
"""Settings that carrel has not, and what happens instead."""


def import_harbor(tasks: Path, into: Path, settings: dict[str, Any], *, workdir: str = "") -> ImportResult:
    """Make a sample of each task in a folder, or of the one that the folder is.

    `workdir` is the work folder of tasks that name none, neither in task.toml nor in their Dockerfile. `settings` is
    for `dataset.yaml`. In the result, `left_out` has the tasks that became no sample, `not_carried_over` what others
    lost; each sample has its own list of that under `harbor`."""
    refuse_wrong(settings)
    folders = _task_folders(tasks)
    done = ImportResult(into)
    with new_dataset(into) as folder:
        samples: dict[str, Sample] = {}
        for task in folders:
            try:
                sample, lost = sample_of(task, workdir)
                if sample.sample_id in samples:
                    raise ValueError(f"another task is called {sample.sample_id} too")
                _copy(task, folder, sample)
            except ValidationError as problem:
                done.left_out.append(SkippedItem(task.name, faults(problem)))
            except (ValueError, OSError) as problem:
                done.left_out.append(SkippedItem(task.name, str(problem)))
            else:
                samples[sample.sample_id] = sample
                done.not_carried_over += [SkippedItem(sample.sample_id, reason) for reason in lost]
        if not samples:
            why = f"; the first: {done.left_out[0].what}: {done.left_out[0].why}"
            raise NoSamplesMade(f"no task in {tasks} could become a sample{why}", done.left_out)
        write_settings(folder, {"name": into.name, **settings})
        write_samples(folder, samples.values())
        done.samples = list(samples)
    return done


def _task_folders(tasks: Path) -> list[Path]:
    if (tasks / TASK).is_file():
        return [tasks.resolve()]
    found = sorted(path.parent for path in tasks.glob(f"*/{TASK}")) if tasks.is_dir() else []
    if not found:
        raise DatasetInvalid(f"there is no Harbor task in {tasks}: a task is a folder with {TASK}")
    return found


def sample_of(task: Path, workdir: str = "") -> tuple[Sample, list[str]]:
    """The sample of a task, with paths as in the new dataset, and what it loses; ValueError says why there is none."""
    config = _read(task)
    environment, verifier, agent = (_table(config, name) for name in ("environment", "verifier", "agent"))
    for name, why in REFUSED.items():
        if _value(config, name):
            raise ValueError(f"{name}: {why}")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise ValueError(f"environment.os: it needs {environment['os']}, and containers run Linux")
    if (task / ENVIRONMENT / "docker-compose.yaml").exists():
        raise ValueError("it has a docker-compose.yaml, and a sample runs in a single container")
    for needed in (INSTRUCTION, f"{TESTS}/test.sh"):
        if not (task / needed).is_file():
            raise ValueError(f"it has no {needed}")
    if not environment.get("docker_image") and not (task / ENVIRONMENT / "Dockerfile").is_file():
        raise ValueError(f"it has neither {ENVIRONMENT}/Dockerfile nor environment.docker_image")
    name = re.sub(r"[^\w.+@-]+", "-", task.name)
    lost = list(_left_out(config))
    at = f"files/{name}"
    limits = {
        "cpus": environment.get("cpus"),
        "memory": _bytes(environment, "memory"),
        "disk": _bytes(environment, "storage"),
    }
    own: dict[str, Any] = {
        "backend": "container",
        "image": environment.get("docker_image") or None,
        "workdir": _workdir(task, environment, workdir),
        "network": _network(environment),
        "env": _variables("environment", environment, lost),
        "limits": {name: value for name, value in limits.items() if value is not None},
        "writable": [LOGS],
        "build_timeout": environment.get("build_timeout_sec"),
    }
    if own["image"] is None:
        own["dockerfile"] = f"{at}/{ENVIRONMENT}/Dockerfile"
    prefix = _assignments(_variables("verifier", verifier, lost))
    verify = {
        "command": f"mkdir -p {LOGS}/verifier {LOGS}/artifacts && {prefix}{TESTS_AT}/test.sh",
        "report": "reward",
        "timeout": verifier.get("timeout_sec", 600.0),
        "tests": f"{at}/{TESTS}",
    }
    sample = {
        "sample_id": name,
        "instance_id": _table(config, "task").get("name"),
        "description": _table(config, "task").get("description"),
        "problem_statement": (task / INSTRUCTION).read_text(encoding="utf-8"),
        "verifier": "custom",
        "agent_timeout": agent.get("timeout_sec"),
        "environment": _given(own),
        "verify": verify,
        "harbor": {"metadata": _table(config, "metadata"), "not_carried_over": lost},
    }
    if (task / SOLUTION / "solve.sh").is_file():
        sample["solution"] = f"{at}/{SOLUTION}"
        prefix = _assignments(_variables("solution", _table(config, "solution"), lost))
        sample["solve"] = f"mkdir -p {LOGS}/agent && {prefix}{SOLUTION_AT}/solve.sh"
    else:
        lost.append(f"it has no {SOLUTION}/solve.sh, so `carrel datasets check` cannot try whether it can be solved")
    lost += _installs(task)
    if (task / "trajectory.json").exists():
        lost.append("trajectory.json: a session begins without an earlier conversation")
    return Sample.model_validate(_given(sample)), lost


def _read(task: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((task / TASK).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{TASK}: {problem}") from None


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"{TASK}: {name} is not a table; write [{name}] and its settings below")
    return found


def _value(config: Mapping[str, Any], path: str) -> Any:
    part, _, name = path.partition(".")
    found = config.get(part)
    return (found.get(name) if isinstance(found, dict) else None) if name else found


def _left_out(config: Mapping[str, Any]) -> Iterator[str]:
    """What is set and not carried over, each with the reason; a setting that carrel does not know is one too."""
    for part, content in config.items():
        inner = isinstance(content, dict) and part not in CARRIED
        for path in [f"{part}.{name}" for name in content] if inner else [part]:
            if path not in CARRIED and path not in REFUSED and _value(config, path) not in (None, [], {}, "", 0):
                yield f"{path}: {LEFT_OUT.get(path, 'carrel does not know this setting')}"


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _network(environment: Mapping[str, Any]) -> bool:
    """Harbor gives the network unless the task says otherwise; `allow_internet` is its older name."""
    mode = environment.get("network_mode")
    if mode is None and environment.get("allowed_hosts") is None:
        return environment.get("allow_internet") is not False
    return mode == "public"


def _bytes(environment: Mapping[str, Any], name: str) -> int | None:
    """`memory_mb = 512`, or as it was called before, `memory = "512M"`."""
    if (mib := environment.get(f"{name}_mb")) is not None:
        return int(float(mib) * MIB)
    text = environment.get(name)
    if text is None:
        return None
    found = _SIZE.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"environment.{name}: {text!r} is not a size such as 2G")
    return int(float(found[1]) * {"K": 1024, "M": MIB, "G": 1024 * MIB}[found[2].upper()])


def _workdir(task: Path, environment: Mapping[str, Any], otherwise: str) -> str:
    dockerfile, path = task / ENVIRONMENT / "Dockerfile", PurePosixPath("/")
    if environment.get("workdir"):
        path = PurePosixPath(environment["workdir"])
    elif environment.get("docker_image") is None and dockerfile.is_file():
        last_stage = _STAGE.split(dockerfile.read_text(encoding="utf-8", errors="replace"))[-1]
        for step in _WORKDIR.findall(last_stage):
            path /= step.strip("\"'")
    if str(path) == "/" or "$" in str(path):
        if not otherwise:
            raise ValueError("neither task.toml nor its Dockerfile names a work folder; give one with --workdir")
        return otherwise
    return str(path)


def _variables(part: str, table: Mapping[str, Any], lost: list[str]) -> dict[str, str]:
    """Variables with plain values; `${NAME}` stands for the host's, and a secret does not belong into a dataset."""
    found: dict[str, str] = {}
    for name, value in table.get("env", {}).items():
        if any(default is None for default in (match[2] for match in _TEMPLATE.finditer(str(value)))):
            lost.append(f"{part}.env.{name}: it is {value} of the host, which is not stored; set it yourself")
        else:
            found[name] = _TEMPLATE.sub(lambda match: match[2], str(value))
    return found


def _assignments(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())


def _installs(task: Path) -> list[str]:
    """The scripts that install system packages, which a read-only system refuses."""
    found = []
    for script in (f"{TESTS}/test.sh", f"{SOLUTION}/solve.sh"):
        if (task / script).is_file():
            text = (task / script).read_text(encoding="utf-8", errors="replace")
            if (match := _INSTALLS.search(text)) is not None:
                found.append(f"{script}: `{match[1]}` fails, as the system is read-only; put it into the Dockerfile")
    return found


def _copy(task: Path, folder: Path, sample: Sample) -> None:
    """Copy what the sample uses into the dataset; links that lead out of the task are refused."""
    names = [TESTS]
    names += [ENVIRONMENT] if sample.environment.dockerfile is not None else []
    names += [SOLUTION] if sample.solution is not None else []
    for path in (each for name in names for each in (task / name).rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(task.resolve()):
            raise ValueError(f"the link {path.relative_to(task)} leads out of the task")
        if not path.is_symlink() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path.relative_to(task)} is not a file, folder or link")
    for name in names:
        target = folder / "files" / sample.sample_id / name
        shutil.copytree(task / name, target, symlinks=True)
        for script in ("test.sh", "solve.sh"):
            if (target / script).is_file():
                (target / script).chmod(0o755)
