"""Inspect's sandbox `carrel`, and an Inspect task from a carrel dataset.

Installed with carrel as the entry point `carrel` of the group `inspect_ai`: `inspect eval … --sandbox carrel`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset
from inspect_ai.dataset import Sample as InspectSample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import TaskState
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandbox,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from carrel.errors import ConfigurationError, SessionClosed, WorkspaceLost
from carrel.execution.config import Limits, SubprocessConfig
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.session.session import Session
from carrel.session.storage import MemoryStorage
from carrel.tasks import Datasets
from carrel.tasks.sample import SampleLimits


class CarrelSandboxConfig(BaseModel):
    """What the sandbox of a sample starts with; see `SubprocessConfig` and `Session.for_sample`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str | None = None
    """A carrel dataset; its sample sets workspace, packages, limits and network, and can be verified."""
    sample_id: str | None = None
    datasets: str | None = None
    """The folder with the dataset; None: `$CARREL_HOME/datasets`, and the demo."""
    workspace: str | None = None
    """A folder of this machine; changes stay in the sandbox. None: an empty folder."""
    network: bool = False
    limits: SampleLimits | None = None

    def open(self) -> Session:
        if self.dataset is not None and self.sample_id is not None:
            return Session.for_sample(self.dataset, self.sample_id, datasets=self.datasets, ttl_minutes=None)
        if self.dataset is not None or self.sample_id is not None:
            raise ConfigurationError("a sandbox of a sample needs both dataset and sample_id")
        limits = self.limits.limits() if self.limits is not None else Limits()
        config = SubprocessConfig(workspace=self.workspace, network=self.network, limits=limits)
        return Session(MemoryStorage(), SubprocessExecutor(config), owns_storage=True)


@sandboxenv(name="carrel")
class CarrelSandbox(SandboxEnvironment):
    """A carrel session as the sandbox of an Inspect sample: `Task(…, sandbox="carrel")`."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return CarrelSandboxConfig(**config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        if isinstance(config, str):
            raise ConfigurationError(
                f"the sandbox carrel was configured with the file {config!r}, which it cannot read; "
                "give a CarrelSandboxConfig instead"
            )
        session = (config if isinstance(config, CarrelSandboxConfig) else CarrelSandboxConfig()).open()
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        return {"default": cls(session)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls).session.close()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user not in (None, "agent", "root") or (user == "root" and not self.session.supports("root_user")):
            raise SandboxUserUnsupportedError(f"commands cannot run as {user!r} in this sandbox; leave `user` out")
        with _unavailable():
            try:
                done = await self.session.execute_command(
                    cmd, stdin=input, cwd=cwd, env=env, user=user, timeout=timeout
                )
            except FileNotFoundError as problem:  # a missing program, as a shell reports it
                return ExecResult(success=False, returncode=127, stdout="", stderr=f"{problem}\n")
        if done.timed_out:
            raise TimeoutError(f"{cmd[0]} had not ended after {timeout} seconds and was killed")
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if done.truncated or max(len(done.stdout), len(done.stderr)) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, done.output[:limit])
        return ExecResult(
            success=done.exit_code == 0, returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr
        )

    async def write_file(self, file: str, contents: str | bytes) -> None:
        with _unavailable():
            await self.session.write_file(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        with _unavailable():
            if (await self.session.stat(file)).size > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            data = await self.session.read_file(file)
        return data.decode("utf-8") if text else data

    def default_polling_interval(self) -> float:
        return 0.2


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn the errors after which a session cannot be used into Inspect's."""
    try:
        yield
    except (SessionClosed, WorkspaceLost) as problem:
        raise SandboxUnavailableError(str(problem)) from problem


@task
def dataset_task(dataset: str = "demo", datasets: str | None = None, sample_id: str | None = None) -> Task:
    """Return the samples of a carrel dataset with their sandboxes and verdicts, to be evaluated with any solver."""
    found = Datasets(Path(datasets) if datasets else None).get(dataset)
    samples = [sample for sample in found.samples if sample.latest and sample_id in (None, sample.sample_id)]
    return Task(
        dataset=MemoryDataset(
            [_inspect_sample(dataset, one.sample_id, one, datasets) for one in samples], name=dataset
        ),
        scorer=verdict(),
    )


def _inspect_sample(dataset: str, sample_id: str, sample: Any, datasets: str | None) -> InspectSample:
    config = CarrelSandboxConfig(dataset=dataset, sample_id=sample_id, datasets=datasets)
    return InspectSample(
        id=sample_id,
        input=sample.problem_statement or sample_id,
        target="solved",
        metadata={"repo": sample.repo, "language": sample.language},
        sandbox=SandboxEnvironmentSpec("carrel", config),
    )


@scorer(metrics=[accuracy(), stderr()])
def verdict() -> Scorer:
    """Score with carrel's verification: correct if the verdict is a success."""

    async def score(state: TaskState, target: Target) -> Score:
        result = await sandbox().as_type(CarrelSandbox).session.verify()
        return Score(
            value=CORRECT if result.is_success else INCORRECT,
            answer=result.outcome,
            explanation="\n".join([f"{result.passed} of {result.total} tests passed", *result.evidence]),
            metadata={"outcome": result.outcome, "score": result.score, "integrity": result.integrity},
        )

    return score
