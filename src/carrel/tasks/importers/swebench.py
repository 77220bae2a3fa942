"""Make a dataset from SWE-bench rows and a folder with the repositories."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
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
from carrel.tasks.sample import Sample, SampleEnvironment

ENDINGS = (".bundle", ".tar.gz", ".tgz", "")
_SAME = (
    "instance_id",
    "repo",
    "base_commit",
    "patch",
    "test_patch",
    "problem_statement",
    "hints_text",
    "environment_setup_commit",
    "created_at",
    "language",
)
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_LISTS = ("fail_to_pass", "pass_to_pass", "fail_to_fail")


def import_swebench(
    file: Path, files: Path | None, into: Path, settings: dict[str, Any], *, image_template: str = ""
) -> ImportResult:
    """Make a sample of each line; its files are found in `files` by its instance_id, else by its repository's name.

    With an `image_template` it runs in a container; `{instance_id}` in it is replaced, and `{hub_id}` by the same with
    `_1776_` for `__`, as Docker Hub has it. Its files are then, without `files`, those in the image. Lines that cannot
    become samples are reported by number. `settings` is for `dataset.yaml`."""
    refuse_wrong(settings)
    if not file.is_file():
        raise DatasetInvalid(f"there is no file {file}")
    if files is None and not image_template:
        raise DatasetInvalid("the files are missing: name a folder of repositories, or images")
    if files is not None and not files.is_dir():
        raise DatasetInvalid(f"there is no folder {files} with the repositories")
    done = ImportResult(into)
    with new_dataset(into) as folder:
        (folder / "files").mkdir()
        samples: dict[str, Sample] = {}
        for number, row in _rows(file, done):
            try:
                sample = sample_of(row)
                if sample.sample_id in samples:
                    raise ValueError(f"{sample.sample_id} is there twice")
                if files is not None:
                    sample.files = _copied(found(files, sample), files, folder)
                if image_template:
                    sample.environment = SampleEnvironment(backend="container", image=_image(image_template, sample))
            except ValidationError as problem:
                done.left_out.append(SkippedItem(f"line {number}", faults(problem)))
            except ValueError as problem:
                done.left_out.append(SkippedItem(f"line {number}", str(problem)))
            else:
                samples[sample.sample_id] = sample
        if not samples:
            why = f"; the first: {done.left_out[0].what}: {done.left_out[0].why}" if done.left_out else ": it is empty"
            raise NoSamplesMade(f"no line of {file} could become a sample{why}", done.left_out)
        write_settings(folder, {"name": into.name, **settings})
        write_samples(folder, samples.values())
        done.samples = list(samples)
    return done


def _image(template: str, sample: Sample) -> str:
    names = {"instance_id": sample.instance_id, "hub_id": sample.instance_id.replace("__", "_1776_")}
    try:
        return template.format_map(names).lower()
    except (KeyError, ValueError, IndexError):
        raise ValueError(f"the template of images {template!r} may have {{instance_id}} and {{hub_id}} only") from None


def _rows(file: Path, done: ImportResult) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as problem:
                done.left_out.append(SkippedItem(f"line {number}", f"not JSON: {problem}"))
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                done.left_out.append(SkippedItem(f"line {number}", "not a JSON object"))


def sample_of(row: dict[str, Any]) -> Sample:
    """Convert a row of SWE-bench to a sample; ValueError says what is wrong with the row."""
    if not isinstance(row.get("instance_id"), str) or not row["instance_id"]:
        raise ValueError("instance_id: it is missing")
    given = {name: row[name] for name in _SAME if row.get(name) is not None}
    for name in _LISTS:
        given[name] = _names(row.get(name, row.get(name.upper())), name)
    if not given["fail_to_pass"]:
        raise ValueError("FAIL_TO_PASS: it is empty, so nothing shows whether the sample is solved")
    version = row.get("version")
    if isinstance(version, str | int | float) and version != "":
        given["version_description"] = f"version {version} of {row.get('repo') or 'the repository'}"
    given["sample_id"] = re.sub(r"[^\w.+@-]+", "-", row["instance_id"])
    given.setdefault("language", "python")
    return Sample.model_validate(given)


def _names(given: Any, field: str) -> list[str]:
    """Read a list of names, which SWE-bench writes as JSON in a string."""
    if given is None or given == "":
        return []
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError:
            raise ValueError(f"{field.upper()}: neither a list of names nor the JSON of one") from None
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{field.upper()}: not a list of names")
    return [dotted(name) for name in given]


def dotted(name: str) -> str:
    """Convert the names that unittest prints, `test_a (pkg.test_x.X)`, to `pkg.test_x.X.test_a`; keep others."""
    found = _UNITTEST.fullmatch(name)
    return f"{found[2].removesuffix(f'.{found[1]}')}.{found[1]}" if found else name


def found(files: Path, sample: Sample) -> Path:
    """The bundle, archive or folder for a sample; ValueError names the paths that were tried."""
    owner, _, name = sample.repo.rpartition("/")
    stems = [sample.sample_id]
    if name:
        stems += [f"{owner}__{name}", f"{owner}-{name}", f"{owner}/{name}", name] if owner else [name]
    for stem in stems:
        for ending in ENDINGS:
            path = files / f"{stem}{ending}"
            if ".." not in path.parts and (path.is_file() if ending else path.is_dir()):
                return path
    looked = ", ".join(f"{stem}.bundle" for stem in stems)
    raise ValueError(
        f"there are no files for {sample.sample_id} in {files}: no {looked}, nor a .tar.gz or folder of that name"
    )


def _copied(path: Path, files: Path, folder: Path) -> Path:
    """Copy it into the dataset; samples that share it have one copy."""
    inside = Path("files") / "__".join(path.relative_to(files).parts)
    target = folder / inside
    if not target.exists():
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True)
        else:
            shutil.copyfile(path, target)
    return inside
