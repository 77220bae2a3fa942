"""Pure: folders of the Agent Skills convention: a SKILL.md with a front matter, and scripts and papers beside it."""

import re
from dataclasses import dataclass
from typing import Any

FILE = "SKILL.md"
LARGEST = 1024 * 1024
"""Bytes of a SKILL.md."""
_LONGEST_FRONT = 16 * 1024
_DEEPEST = 20
_LONGEST_NAME = 200
_LONGEST_DESCRIPTION = 4000
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_PAIR = re.compile(r"^([\w-]+):(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Skill:
    """What a SKILL.md says."""

    name: str
    description: str
    instructions: str
    """The text after the front matter."""
    front: dict[str, Any]
    """All of the front matter."""


def read_skill(folder: str, text: str) -> Skill:
    """Read a SKILL.md; the folder's name stands in for a missing one. ValueError for a front matter that is none."""
    if len(text) > LARGEST:
        raise ValueError(f"it is longer than {LARGEST} characters; keep the rest in files beside it")
    found = _FRONT.match(text)
    front = _pairs(found[1]) if found is not None else {}
    instructions = text[found.end() :] if found is not None else text
    name = str(front.get("name") or folder)[:_LONGEST_NAME]
    description = " ".join(str(front.get("description") or _first_line(instructions)).split())[:_LONGEST_DESCRIPTION]
    return Skill(name, description, instructions.strip("\n"), front)


def _pairs(written: str) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 -- few have such folders, and it takes a while to load

    if len(written) > _LONGEST_FRONT:
        raise ValueError(f"its front matter is longer than {_LONGEST_FRONT} characters")
    try:
        depth = 0
        for event in yaml.parse(written, yaml.SafeLoader):
            # A few lines of aliases of aliases can come to gigabytes, and nobody needs one in a front matter.
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("its front matter has an alias (*name), which is not taken; write it out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"its front matter is nested deeper than {_DEEPEST}")
        front = yaml.safe_load(written)
    except yaml.YAMLError:
        # Many are written by hand with a colon in the description, which YAML takes for a second key.
        front = {key: value.strip() for key, value in _PAIR.findall(written)}
    if front is None:
        return {}
    if not isinstance(front, dict):
        raise ValueError(f"its front matter is no list of `key: value` lines but {type(front).__name__}")
    return {str(key): value for key, value in front.items()}


def _first_line(text: str) -> str:
    return next((line.lstrip("# ") for line in text.splitlines() if line.strip()), "")
