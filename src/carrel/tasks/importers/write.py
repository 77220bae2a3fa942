"""Write a dataset folder completely or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import yaml

from carrel.errors import DatasetExists, DatasetInvalid
from carrel.tasks.dataset import DEFINITION, SAMPLES, Definition, settings_of
from carrel.tasks.sample import Sample, plain_name


class SkippedItem(NamedTuple):
    """Something that did not become a sample, and why."""

    what: str
    why: str


@dataclass
class ImportResult:
    """The samples that an import made, and what it left out."""

    folder: Path
    samples: list[str] = field(default_factory=list)
    """The ids of the new samples."""
    left_out: list[SkippedItem] = field(default_factory=list)
    not_carried_over: list[SkippedItem] = field(default_factory=list)
    """What samples have lost on the way: the id of a sample each time, and a setting of its task."""
    proposal: str = ""
    """Options that may turn commits that were left out into samples."""


@contextmanager
def new_dataset(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` at the end; DatasetExists when `folder` exists already."""
    try:
        plain_name(folder.name)
    except ValueError as problem:
        raise DatasetInvalid(f"a dataset cannot have this name: {problem}") from None
    if folder.exists():
        raise DatasetExists(f"{folder} exists already; choose another name, or remove it first")
    folder = folder.absolute()  # git runs in another folder than this process
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Names that start with a dot are not listed as datasets.
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        try:
            os.rename(temporary, folder)
        except OSError:
            if folder.exists():
                raise DatasetExists(f"{folder} was created by another process meanwhile") from None
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_wrong(settings: dict[str, Any]) -> None:
    """Raise DatasetInvalid for settings with which the dataset could not be loaded."""
    settings_of(Definition(Path(DEFINITION), settings, None))


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write `dataset.yaml`, without empty values."""
    kept = {name: value for name, value in settings.items() if value not in ("", None, {}, [])}
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=120)
    (folder / DEFINITION).write_text(text, encoding="utf-8")


def write_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """Write `samples.jsonl`: of each sample its own values that are not empty, with a relative path in `files`."""
    with (folder / SAMPLES).open("wb") as lines:
        for sample in samples:
            fields = sample.model_dump(mode="json", exclude_defaults=True, exclude={"dataset", "latest", "files"})
            if fields.get("instance_id") == sample.sample_id:
                del fields["instance_id"]
            for part in ("environment", "verify"):
                if not fields.get(part):
                    fields.pop(part, None)
            if sample.files is not None:
                fields["files"] = str(sample.files)
            lines.write(orjson.dumps(fields) + b"\n")
