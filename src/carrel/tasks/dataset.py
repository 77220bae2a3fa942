"""A dataset: a folder with `dataset.yaml`, `samples.jsonl` and the files of its samples."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from carrel.errors import DatasetInvalid, DatasetNotFound, SampleNotFound
from carrel.home import resolve_carrel_home
from carrel.tasks.sample import PlainName, Sample, SampleEnvironment, VerifySettings
from carrel.text import did_you_mean
from carrel.wire.answers import DatasetInfo
from carrel.yaml_files import YamlFault, line_of, read_yaml

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True)
class Definition:
    """The content of a YAML file, with the positions of its fields."""

    file: Path
    data: dict[str, Any]
    root: yaml.Node | None

    def error(self, problem: ValidationError, part: str | None = None) -> DatasetInvalid:
        """The first error with its line; `part` is the field that was validated."""
        where = (*((part,) if part else ()), *problem.errors()[0]["loc"])
        line = f", line {line_of(self.root, where)}" if self.root is not None else ""
        return DatasetInvalid(f"{self.file}{line}: {faults(problem, part)}")


def read_definition(file: Path) -> Definition:
    """Read a file; DatasetInvalid if it is not a mapping."""
    try:
        data, root = read_yaml(file.read_bytes())
    except YamlFault as fault:
        raise DatasetInvalid(fault.in_file(file)) from None
    if data is None:
        return Definition(file, {}, None)
    if not isinstance(data, dict):
        raise DatasetInvalid(f"{file}, line 1: expected a mapping, like `name: demo`")
    return Definition(file, data, root)


def faults(problem: ValidationError, part: str | None = None) -> str:
    """The first error as `field: what is wrong`, and the number of further ones."""
    every = problem.errors()
    first = every[0]
    field = ".".join(str(step) for step in (*((part,) if part else ()), *first["loc"]))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    elif first["type"] == "missing":
        message = "missing"
    given = first["input"]
    if isinstance(given, int) and abs(given) > 10**100:
        given = None  # Python refuses to print very long numbers.
    if isinstance(given, str | int | float | bool) and first["type"] not in (
        "missing",
        "extra_forbidden",
        "value_error",
    ):
        message += f", not {given!r}"[:120]
    more = f" (and {len(every) - 1} more)" if len(every) > 1 else ""
    return (f"{field}: " if field else "") + message + more


logger = logging.getLogger(__name__)

DEFINITION, SAMPLES = "dataset.yaml", "samples.jsonl"
DEMO = Path(__file__).with_name("demo")
"""The dataset that is part of the package."""
_MAX_LINE = 64 * 1024 * 1024


class DatasetSettings(BaseModel):
    """The content of `dataset.yaml`."""

    model_config = ConfigDict(extra="forbid")

    name: PlainName | None = None
    description: str = ""
    created_at: datetime | None = None
    environment: dict[str, Any] = {}
    verify: dict[str, Any] = {}


@dataclass(frozen=True)
class Dataset:
    """The samples of one folder."""

    name: str
    folder: Path
    description: str
    created_at: datetime
    versions: tuple[Sample, ...]
    """All lines in order; a sample can have several versions."""

    @property
    def samples(self) -> list[Sample]:
        """The latest version of each sample."""
        return [sample for sample in self.versions if sample.latest]

    @property
    def info(self) -> DatasetInfo:
        return DatasetInfo(
            name=self.name,
            sample_count=len(self.samples),
            created_at=self.created_at,
            description=self.description,
        )

    def sample(self, sample_id: str, version: int | None = None) -> Sample:
        """One sample in its latest or the given version; SampleNotFound names similar ids."""
        of_this_id = [sample for sample in self.versions if sample.sample_id == sample_id]
        if not of_this_id:
            near = did_you_mean(sample_id, [sample.sample_id for sample in self.samples])
            raise SampleNotFound(f"dataset {self.name} has no sample {sample_id!r}{near}")
        for sample in of_this_id:
            if sample.version == version or (version is None and sample.latest):
                return sample
        versions = ", ".join(str(sample.version) for sample in of_this_id)
        raise SampleNotFound(f"sample {sample_id} of {self.name} has no version {version}; it has {versions}")

    @classmethod
    def load(cls, folder: Path | str, name: str | None = None) -> Dataset:
        """Read a folder; DatasetInvalid has the file, the line and the field of the first error.

        Its name is `name`, else the one in `dataset.yaml`, else that of the folder."""
        folder = Path(folder).expanduser().absolute()
        if not folder.is_dir():
            raise DatasetNotFound(f"there is no dataset folder {folder}", f"there is no dataset {folder.name!r}")
        file, lines = folder / DEFINITION, folder / SAMPLES
        if not lines.is_file():
            raise DatasetInvalid(f"{folder} is not a dataset: it has no {SAMPLES}")
        definition = read_definition(file) if file.exists() else Definition(file, {}, None)
        settings = settings_of(definition)
        name = name or settings.name or folder.name
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DatasetInvalid(f"{str(folder)!r}: the name of the folder is not UTF-8; rename it")
        samples = list(_samples(lines, folder, name, settings))
        _mark_latest(samples)
        created = settings.created_at or datetime.fromtimestamp(lines.stat().st_mtime, UTC)
        return cls(name, folder, settings.description, created, tuple(samples))


def settings_of(definition: Definition) -> DatasetSettings:
    """Validate a definition; DatasetInvalid has the first error."""
    try:
        settings = DatasetSettings.model_validate(definition.data)
        # The settings for all samples must be valid by themselves, even if each sample overrides them.
        for part, model in (("environment", SampleEnvironment), ("verify", VerifySettings)):
            try:
                model.model_validate(getattr(settings, part))
            except ValidationError as problem:
                raise definition.error(problem, part) from None
    except ValidationError as problem:
        raise definition.error(problem) from None
    return settings


def _samples(file: Path, folder: Path, dataset: str, settings: DatasetSettings) -> Iterator[Sample]:
    seen: dict[tuple[str, int], int] = {}
    for number, line in _lines(file):
        try:
            given = orjson.loads(line)
        except orjson.JSONDecodeError as problem:
            raise DatasetInvalid(f"{file}, line {number}: not JSON: {problem}") from None
        if not isinstance(given, dict):
            raise DatasetInvalid(f"{file}, line {number}: a sample is a JSON object, not {type(given).__name__}")
        given["dataset"] = dataset
        for part in ("environment", "verify"):
            own = given.get(part)
            if own is None or isinstance(own, dict):
                given[part] = merged(getattr(settings, part), own or {})
        try:
            sample = Sample.model_validate({name: value for name, value in given.items() if value is not None})
            _resolve_paths(sample, folder)
        except ValidationError as problem:
            raise DatasetInvalid(f"{file}, line {number}{_sample_name(given)}: {faults(problem)}") from None
        except ValueError as problem:
            raise DatasetInvalid(f"{file}, line {number}{_sample_name(given)}: {problem}") from None
        before = seen.setdefault((sample.sample_id, sample.version), number)
        if before != number:
            raise DatasetInvalid(
                f"{file}, line {number}: sample_id: {sample.sample_id!r} in version {sample.version} is on line "
                f"{before} already; another version of it has another `version`"
            )
        yield sample


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(_MAX_LINE):
            number += 1
            if len(line) == _MAX_LINE and not line.endswith(b"\n"):
                raise DatasetInvalid(f"{file}, line {number}: longer than {_MAX_LINE:,} bytes")
            if line.strip():
                yield number, line


def _sample_name(given: dict[str, Any]) -> str:
    named = given.get("sample_id")
    return f" ({named[:80]})" if isinstance(named, str) and named else ""


def _resolve_paths(sample: Sample, folder: Path) -> None:
    sample.files = _resolve_path("files", sample.files, folder)
    environment = sample.environment
    environment.dockerfile = _resolve_path("environment.dockerfile", environment.dockerfile, folder)
    environment.context = _resolve_path("environment.context", environment.context, folder)
    sample.verify.tests = _resolve_path("verify.tests", sample.verify.tests, folder)
    sample.solution = _resolve_path("solution", sample.solution, folder)


def _resolve_path(field: str, files: Path | None, folder: Path) -> Path | None:
    """A path of a sample, which must be inside the dataset's folder, but not that folder: it has the solutions."""
    if files is None:
        return None
    inside = Path(os.path.normpath(files))
    if files.is_absolute() or inside.parts[:1] in ((), ("..",)):
        raise ValueError(
            f"{field}: {str(files)!r} is not inside the dataset's folder; write a path below it, like files/a.tar.gz"
        )
    if inside.parts[0] in (DEFINITION, SAMPLES):
        raise ValueError(f"{field}: {str(files)!r} is the dataset itself; write another path, like files/a.tar.gz")
    return folder / inside


def merged(general: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge key by key, also in maps like `env` and `limits`; lists are replaced, not merged."""
    result = dict(general)
    for name, value in own.items():
        before = result.get(name)
        result[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def _mark_latest(samples: list[Sample]) -> None:
    newest: dict[str, int] = {}
    for sample in samples:
        newest[sample.sample_id] = max(sample.version, newest.get(sample.sample_id, 0))
    for sample in samples:
        sample.latest = sample.version == newest[sample.sample_id]


class Datasets:
    """A folder of datasets; a dataset is read again when its files have changed."""

    def __init__(self, folder: Path | str | None = None, *, demo: bool | None = None) -> None:
        """The default folder is `$CARREL_HOME/datasets`. `demo`: include the demo (default: only without a folder)."""
        self.folder = Path(folder).expanduser().absolute() if folder is not None else resolve_carrel_home() / "datasets"
        self._with_demo = folder is None if demo is None else demo
        self._read: dict[Path, tuple[object, Dataset]] = {}

    def names(self) -> list[str]:
        """The names of the folders, sorted."""
        return sorted(self._folders())

    def list(self) -> list[DatasetInfo]:
        """All datasets that can be read; a warning is logged for each other one."""
        found = []
        for name in self.names():
            try:
                found.append(self.get(name).info)
            except (DatasetInvalid, DatasetNotFound, OSError) as problem:
                logger.warning("the dataset %s cannot be read: %s", name, problem)
        return found

    def get(self, name: str) -> Dataset:
        """The dataset in the folder of this name; DatasetNotFound lists the existing names."""
        folders = self._folders()
        if name not in folders:
            names = ", ".join(sorted(folders)) or "none"
            public = f"there is no dataset {name!r}; there is: {names}"
            raise DatasetNotFound(f"there is no dataset {name!r} in {self.folder}; there is: {names}", public)
        folder = folders[name]
        marks = tuple(_mark(folder / file) for file in (DEFINITION, SAMPLES))
        known = self._read.get(folder)
        if known is None or known[0] != marks:
            known = self._read[folder] = (marks, Dataset.load(folder, name))
        return known[1]

    def _folders(self) -> dict[str, Path]:
        found = {"demo": DEMO} if self._with_demo else {}
        try:
            below: Iterable[Path] = list(self.folder.iterdir())
        except FileNotFoundError:
            below = ()
        found |= {path.name: path for path in below if (path / SAMPLES).is_file() and not path.name.startswith(".")}
        return found


def _mark(file: Path) -> tuple[int, int, int] | None:
    try:
        about = file.stat()
    except FileNotFoundError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
