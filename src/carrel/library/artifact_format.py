"""How artifacts are stored: names and keys, data as bytes, and the record about each artifact."""

import json
import logging
import re
from typing import Any, Literal

from carrel.errors import ArtifactNameRefused, ArtifactWriteError
from carrel.storage.base import Stamp

_logger = logging.getLogger("carrel.library")

# --- names and keys ---------------------------------------------------------------------------------------------------

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that break a line or change the direction of text in a terminal."""
_LONGEST_PART, _LONGEST_NAME = 240, 900
"""Bytes. File systems allow 255 in one part, and the name of a record is a little longer than that of its artifact."""


def validate_artifact_name(name: object) -> str:
    """Return a name that is a relative path; else raise `ArtifactNameRefused`."""
    if not isinstance(name, str) or not name:
        raise ArtifactNameRefused(
            f"invalid artifact name {repr(name)[:100]}; use a str such as 'report.md' or 'plots/a.png'"
        )
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or _FORBIDDEN.search(name):
        raise ArtifactNameRefused(
            f"invalid artifact name {name!r}; use a relative path without '..', empty parts, backslashes, control"
            " characters and characters that break lines or change the direction of text"
        )
    try:
        longest = max(len(_escape(part).encode()) for part in parts)
    except UnicodeEncodeError:
        raise ArtifactNameRefused(f"invalid artifact name {name!r}: it contains half of a surrogate pair") from None
    if longest > _LONGEST_PART or len(name.encode()) > _LONGEST_NAME:
        raise ArtifactNameRefused(
            f"the artifact name {name[:40]!r}… is too long; use at most {_LONGEST_PART} bytes in a part of the path"
            f" and {_LONGEST_NAME} in all"
        )
    return name


def is_artifact_name(name: str) -> bool:
    """Whether a name is valid."""
    try:
        validate_artifact_name(name)
    except ArtifactNameRefused:
        return False
    return True


def name_to_key(name: str) -> str:
    """Return the key of an artifact below the store's prefix; no part of a key may begin with a dot."""
    return "/".join(map(_escape, name.split("/")))


def key_to_name(key: str) -> str:
    """Reverse `name_to_key`."""
    return "/".join(map(_unescape, key.split("/")))


def record_key(name: str) -> str:
    """Return the key of an artifact's record; no folder of records has the name of a record."""
    *folders, last = map(_escape, name.split("/"))
    return "/".join([*(re.sub(r"(\.json~*)$", r"\1~", folder) for folder in folders), f"{last}.json"])


def lock_key(name: str) -> str:
    """Return the key of the lock that is held to save an artifact.

    All artifacts in a folder share it, because a name cannot be both an artifact and a folder."""
    return _escape(name.partition("/")[0])


def _escape(part: str) -> str:
    return f"%{ord(part[0]):02x}{part[1:]}" if part[:1] in (".", "%") else part


def _unescape(part: str) -> str:
    return f"{chr(int(part[1:3], 16))}{part[3:]}" if part[:3] in ("%2e", "%25") else part


# --- data -------------------------------------------------------------------------------------------------------------

Kind = Literal["text", "bytes", "json"]
KINDS: tuple[Kind, ...] = ("text", "bytes", "json")

_TEXT_SUFFIXES = (
    *(".txt", ".md", ".csv", ".tsv", ".html", ".xml", ".svg"),
    *(".yaml", ".yml", ".toml", ".log", ".py", ".jsonl"),
)
_DEEPEST = 500


def encode(name: str, data: Any) -> tuple[Kind, bytes]:
    """Return the kind of data and its bytes; `ArtifactWriteError` if it could not be loaded as it is."""
    if isinstance(data, str):
        return "text", data.encode("utf-8", "surrogatepass")
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes", bytes(data)
    check_json(name, data)
    try:
        return "json", json.dumps(data, indent=1).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise ArtifactWriteError(f"{name} was not saved: it is not JSON data: {error}") from None


def decode(kind: Kind, data: bytes) -> Any:
    """Return the data that `encode` was given; ValueError if the bytes are not of this kind."""
    if kind == "bytes":
        return data
    text = data.decode("utf-8", "surrogatepass")
    return json.loads(text) if kind == "json" else text


def guess(name: str, data: bytes, saved_as: str | None) -> tuple[Kind, Any]:
    """Return the kind and the data of a file that was written or edited by hand.

    It is of the kind that it was saved as, if it still can be; else the name and the content decide."""
    kinds: list[Kind] = [kind for kind in KINDS if kind == saved_as]
    if saved_as is None and name.endswith(".json"):
        kinds = ["json"]
    if b"\0" not in data and kinds != ["bytes"]:
        kinds.append("text")
    for kind in kinds:
        try:
            return kind, decode(kind, data)
        except ValueError:
            continue
    return "bytes", data


def guess_kind(name: str) -> Kind:
    """Return the kind of a file by its name alone."""
    return "json" if name.endswith(".json") else "text" if name.endswith(_TEXT_SUFFIXES) else "bytes"


def check_json(name: str, data: Any, path: str = "data", depth: int = 0) -> None:
    """Raise `ArtifactWriteError` with the path to what is not JSON data. Tuples count as lists."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return
    if depth > _DEEPEST:
        raise ArtifactWriteError(f"{name} was not saved: {path[:80]}… is nested too deeply, or contains itself")
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise ArtifactWriteError(
                    f"{name} was not saved: {path} has the key {key!r}, and keys of JSON data are str; use str({key!r})"
                )
            check_json(name, value, f"{path}[{key!r}]", depth + 1)
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            check_json(name, value, f"{path}[{number}]", depth + 1)
    else:
        kind = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
        raise ArtifactWriteError(
            f"{name} was not saved: {path} is a {kind}; save str, bytes, a Path to a file, or JSON data"
            " (code in a session can also save DataFrames and figures)"
        )


# --- the record about an artifact -------------------------------------------------------------------------------------

LONGEST_RECORD = 64 * 1024
"""Characters of a description and its metadata together."""

Record = dict[str, Any]
"""What is known about the data of an artifact: `kind`, `form`, `description`, `metadata`, `created_at`, `updated_at`,
`size`, `sha256`; and as `before`, with their `stamp`, the same about the data that were there before.

The record is written before the data. Until the data follow, or if they never do, `before` describes what is there, so
that each version has its own kind and description at any moment, also after a crash."""


def new_record(name: str, kind: Kind, form: str, description: str, metadata: dict[str, Any] | None) -> Record:
    """Return a record of new data; `ArtifactWriteError` for invalid metadata."""
    if not isinstance(description, str):
        raise ArtifactWriteError(f"{name} was not saved: its description must be str, not {type(description).__name__}")
    if metadata is not None and not isinstance(metadata, dict):
        raise ArtifactWriteError(f"{name} was not saved: its metadata must be a dict, not {type(metadata).__name__}")
    check_json(name, metadata or {}, "metadata")
    if len(description) + len(json.dumps(metadata or {})) > LONGEST_RECORD:
        raise ArtifactWriteError(
            f"{name} was not saved: its description and metadata are longer than {LONGEST_RECORD} characters;"
            " save large data as another artifact"
        )
    return {"kind": kind, "form": str(form), "description": description, "metadata": metadata or {}}


def parse_record(name: str, data: bytes | None) -> Record | None:
    """Read a record; None, with a warning in the log, if it is damaged."""
    if data is None:
        return None
    try:
        record = json.loads(data)
        before = record.get("before") or {}
        if record["kind"] in KINDS and isinstance(before, dict) and isinstance(before.get("stamp", []), list):
            return dict(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    _logger.warning("the record of the artifact %s is damaged and ignored", name)
    return None


def record_for_stamp(record: Record | None, stamp: Stamp | None) -> Record:
    """Return what describes the data with this stamp: the record, or its `before`. Decides without reading data."""
    record = record or {}
    before = record.get("before")
    if not before or stamp is None:
        return record
    saved = before.get("stamp", [])
    # Replacing a file changes its version at once, so size and time are compared. Two versions of the same size that
    # were written at the same time differ by their version only.
    is_before = saved[:2] == list(stamp[:2]) if record.get("size") != stamp.size else saved == list(stamp)
    return before if is_before else record


def record_for_digest(record: Record | None, stamp: Stamp | None, digest: str) -> Record | None:
    """Return what describes the data with this digest; None if they were written or edited by hand."""
    if record is None:
        return None
    candidates = (record_for_stamp(record, stamp), record, record.get("before"))
    return next((one for one in candidates if one and one.get("sha256") == digest and one.get("kind") in KINDS), None)


def may_describe(record: Record | None, stamp: Stamp | None) -> bool:
    """Whether a record may describe the data with this stamp; if not, they were written by hand, or saved after the
    record was read."""
    return stamp is None or record_for_stamp(record, stamp).get("size") == stamp.size
