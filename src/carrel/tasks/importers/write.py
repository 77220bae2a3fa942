"""Write a dataset folder completely or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml

from carrel.errors import DatasetExists, DatasetInvalid
from carrel.tasks.dataset import DEFINITION, SAMPLES, Definition, settings_of
from carrel.tasks.sample import Sample, plain_name


@dataclass(frozen=True)
class SkippedItem:
    """Something that did not become a sample, and why."""

    what: str
    why: str


@dataclass
class ImportResult:
    """What came of an import."""

    folder: Path
    samples: list[str] = field(default_factory=list)
    """Their ids."""
    left_out: list[SkippedItem] = field(default_factory=list)
    proposal: str = ""
    """Options that may turn commits that were left out into samples."""


@contextmanager
def new_dataset(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes its place when all is done; DatasetExists where one is there already."""
    try:
        plain_name(folder.name)
    except ValueError as problem:
        raise DatasetInvalid(f"a dataset cannot have this name: {problem}") from None
    if folder.exists():
        raise DatasetExists(f"{folder} is there already; choose another name, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Its name begins with a dot: a folder of datasets does not list it.
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        making.chmod(0o755)
        yield making
        try:
            os.rename(making, folder)
        except OSError:
            if folder.exists():
                raise DatasetExists(f"{folder} was made by somebody else meanwhile") from None
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def refuse_wrong(settings: dict[str, Any]) -> None:
    """DatasetInvalid for settings that a dataset could not be read with afterwards."""
    settings_of(Definition(Path(DEFINITION), settings, None))


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """`dataset.yaml`, without what is empty."""
    kept = {name: value for name, value in settings.items() if value not in ("", None, {}, [])}
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=120)
    (folder / DEFINITION).write_text(text, encoding="utf-8")


def write_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """`samples.jsonl`: of each, what is its own and not empty; `files` as a path beside it."""
    with (folder / SAMPLES).open("wb") as lines:
        for sample in samples:
            said = sample.model_dump(mode="json", exclude_defaults=True, exclude={"dataset", "latest", "files"})
            if said.get("instance_id") == sample.sample_id:
                del said["instance_id"]
            for part in ("environment", "verify"):
                if not said.get(part):
                    said.pop(part, None)
            if sample.files is not None:
                said["files"] = str(sample.files)
            lines.write(orjson.dumps(said) + b"\n")
