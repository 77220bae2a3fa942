"""Pure: folders of the Agent Skills convention: a SKILL.md with a front matter, and scripts and papers beside it."""

import re
from dataclasses import dataclass
from typing import Any

FILE = "SKILL.md"
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_PAIR = re.compile(r"^([\w-]+):[ \t]*(.*?)[ \t]*$", re.MULTILINE)


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
    found = _FRONT.match(text)
    front = _pairs(found[1]) if found is not None else {}
    instructions = text[found.end() :] if found is not None else text
    name = str(front.get("name") or folder)
    description = " ".join(str(front.get("description") or _first_line(instructions)).split())
    return Skill(name, description, instructions.strip("\n"), front)


def _pairs(written: str) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 -- few have such folders, and it takes a while to load

    try:
        front = yaml.safe_load(written)
    except yaml.YAMLError:
        # Many are written by hand with a colon in the description, which YAML takes for a second key.
        front = dict(_PAIR.findall(written))
    if front is None:
        return {}
    if not isinstance(front, dict):
        raise ValueError(f"its front matter is no list of `key: value` lines but {type(front).__name__}")
    return {str(key): value for key, value in front.items()}


def _first_line(text: str) -> str:
    return next((line.lstrip("# ") for line in text.splitlines() if line.strip()), "")
