"""Pure: the names of artifacts, and the keys they lie under."""

import re

from carrel.errors import ArtifactNameRefused

_BAD = re.compile(r"[\x00-\x1f\x7f-\x9f\\\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that break a line or turn the direction: a name is read by people in terminals."""
_LONGEST = 240
"""Bytes in one part of a name; a file name has 255, and the notes about an artifact are called a little longer."""


def checked_name(name: object) -> str:
    """The name itself when it is a plain relative path, else `ArtifactNameRefused`."""
    if not isinstance(name, str) or not name:
        raise ArtifactNameRefused(
            f"an artifact's name is a text like 'report.md' or 'plots/a.png', not {repr(name)[:100]}"
        )
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or _BAD.search(name):
        raise ArtifactNameRefused(
            f"{name!r} is no name for an artifact: a relative path without '..', empty parts, backslashes and control"
            " characters, also those that break lines or turn the direction of text"
        )
    try:
        longest = max(len(key_part(part).encode()) for part in parts)
    except UnicodeEncodeError:
        raise ArtifactNameRefused(f"the name {name!r} has half a surrogate pair, which no file can have") from None
    if longest > _LONGEST or len(name.encode()) > 900:
        raise ArtifactNameRefused(f"the name {name[:40]!r}… is too long: {_LONGEST} bytes a part, 900 in all")
    return name


def is_name(name: str) -> bool:
    try:
        checked_name(name)
    except ArtifactNameRefused:
        return False
    return True


def key_part(part: str) -> str:
    """One part of a name as it stands in a key, where none begins with a dot."""
    return f"%{ord(part[0]):02x}{part[1:]}" if part[:1] in (".", "%") else part


def name_part(part: str) -> str:
    return f"{chr(int(part[1:3], 16))}{part[3:]}" if part[:3] in ("%2e", "%25") else part


def key_of(name: str) -> str:
    return "/".join(map(key_part, name.split("/")))


def name_of(key: str) -> str:
    return "/".join(map(name_part, key.split("/")))


def note_of(name: str) -> str:
    """Where the note about an artifact lies; no folder there is called as a note is."""
    *folders, last = map(key_part, name.split("/"))
    return "/".join([*(re.sub(r"(\.json~*)$", r"\1~", folder) for folder in folders), f"{last}.json"])


def lock_of(name: str) -> str:
    """What is held while it is saved: the same for all in one folder, as no name is both an artifact and a folder."""
    return key_part(name.partition("/")[0])
