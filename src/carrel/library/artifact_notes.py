"""Pure: what is noted of an artifact, and which of its notes is that of the data that are there."""

import json
import logging
from typing import Any

from carrel.errors import ArtifactWriteError
from carrel.library.artifact_data import KINDS, Kind, check_json
from carrel.storage.base import Stamp

LONGEST_NOTE = 64 * 1024
"""Characters of a description and its metadata together."""
_log = logging.getLogger("carrel.library")

Note = dict[str, Any]
"""`before` in it is the note of the data that it found there, with their stamp."""


def new_note(name: str, kind: Kind, form: str, description: str, metadata: dict[str, Any] | None) -> Note:
    """What is said of data that are saved; `ArtifactWriteError` for what cannot be noted."""
    if not isinstance(description, str):
        raise ArtifactWriteError(f"{name} was not saved: its description is a text, not {type(description).__name__}")
    if metadata is not None and not isinstance(metadata, dict):
        raise ArtifactWriteError(f"{name} was not saved: its metadata is a dict, not {type(metadata).__name__}")
    check_json(name, metadata or {}, "metadata")
    if len(description) + len(json.dumps(metadata or {})) > LONGEST_NOTE:
        raise ArtifactWriteError(
            f"{name} was not saved: its description and metadata are longer than {LONGEST_NOTE} characters; every list"
            " shows them, so keep what is large in an artifact of its own"
        )
    return {"kind": kind, "form": str(form), "description": description, "metadata": metadata or {}}


def read_note(name: str, data: bytes | None) -> Note | None:
    """A note as it was written; None, and a warning, for what is none."""
    if data is None:
        return None
    try:
        note = json.loads(data)
        before = note.get("before") or {}
        if note["kind"] in KINDS and isinstance(before, dict) and isinstance(before.get("stamp", []), list):
            return dict(note)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    _log.warning("the note about the artifact %s cannot be read and is passed over", name)
    return None


def standing(note: Note | None, stamp: Stamp | None) -> Note:
    """What is known of the data that are there: of those before, while they are still the same."""
    note = note or {}
    before = note.get("before")
    if not before or stamp is None:
        return note
    then = before.get("stamp", [])
    # To a file system it is another version as soon as the file is being replaced. Where both are of one size, and so
    # soon after each other that they have one time, the version tells.
    same = then[:2] == list(stamp[:2]) if note.get("size") != stamp.size else then == list(stamp)
    return before if same else note


def fitting(note: Note | None, stamp: Stamp | None, digest: str) -> Note | None:
    """The same where the data are at hand; None when they are neither of the two, but a person's."""
    stands = standing(note, stamp)
    both = (stands, note, note.get("before")) if note is not None else ()
    return next((one for one in both if one and one.get("sha256") == digest and one.get("kind") in KINDS), None)


def speaks_of(note: Note | None, stamp: Stamp | None) -> bool:
    """Whether it can be the note of these data: else a person wrote them, or they were saved after it was read."""
    return stamp is None or standing(note, stamp).get("size") == stamp.size
