"""Pure: a requirements.txt as a person wrote it, read and edited so that every other line stays as it was."""

from __future__ import annotations

import re
from dataclasses import dataclass

from carrel.errors import RequirementRefused

_COMMENT = re.compile(r"(?:^|\s+)#.*$")
_ARCHIVE = re.compile(r"\.(whl|zip|egg|tgz|tbz|txz|tar(\.\w+)?)$", re.IGNORECASE)
"""What an installer takes for a file, though a package may be called so."""
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
"""In an address: code inside may read the list, and has no business with them."""
_EXAMPLES = "a name with versions, as in pandas, pandas>=2 or requests[socks]==2.32.3"
_LONGEST = 500


@dataclass(frozen=True)
class Written:
    """One requirement of the file."""

    first: int
    """Its line, from 0; a line that ends with a backslash goes on in the next."""
    after: int
    text: str
    """Without its comment."""
    name: str = ""
    """Normalized; empty where the line is no requirement that carrel installs."""
    problem: str = ""


def checked(requirement: str) -> str:
    """The requirement without what is around it; RequirementRefused says what is wrong and what it may be."""
    from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415 -- few sessions install

    if not isinstance(requirement, str):
        raise RequirementRefused(f"a requirement is a text, not {type(requirement).__name__}: write {_EXAMPLES}")
    text = requirement.strip()
    shown = repr(text if len(text) <= 80 else text[:80] + "…")
    if not text:
        raise RequirementRefused(f"an empty requirement: write {_EXAMPLES}")
    if len(text) > _LONGEST or re.search(r"[\x00-\x1f\x7f]", text):
        raise RequirementRefused(f"{shown} is longer than {_LONGEST} characters or has control characters in it")
    if text.startswith("-"):
        raise RequirementRefused(f"{shown} is an option of the installer, and none can be given: write {_EXAMPLES}")
    before_address = text.partition("@")[0].rstrip()
    if re.search(r"[/\\]|^[.~]", before_address) or _ARCHIVE.search(before_address.partition("[")[0]):
        raise RequirementRefused(f"{shown} is an address or a path, and none is taken: write {_EXAMPLES}")
    try:
        found = Requirement(text)
    except InvalidRequirement as problem:
        said = str(problem).splitlines()[0]
        raise RequirementRefused(f"{shown} is no requirement ({said}): write {_EXAMPLES}") from None
    if not found.name[-1].isalnum():
        raise RequirementRefused(f"{shown} is no requirement (a name ends with a letter or a digit): write {_EXAMPLES}")
    if found.url is not None:
        raise RequirementRefused(f"{shown} names an address, and packages come by name only: write {_EXAMPLES}")
    if found.marker is not None:
        raise RequirementRefused(f"{shown} has a condition after the semicolon, and none is taken: leave it out")
    return text


def name_of(requirement: str) -> str:
    """Its package, in the one spelling that all spellings of the name have."""
    from packaging.requirements import Requirement  # noqa: PLC0415 -- as above

    return re.sub(r"[-_.]+", "-", Requirement(checked(requirement)).name).lower()


def is_bare(requirement: str) -> bool:
    """Whether it is a name and nothing else."""
    return re.fullmatch(r"[\w.-]+", requirement.strip()) is not None


def merged(written: str, requirement: str) -> str:
    """The requirement, with what only the line that is there says: extras, and versions where none are given."""
    from packaging.requirements import Requirement  # noqa: PLC0415 -- as above

    old, new = Requirement(written), Requirement(requirement)
    if old.extras <= new.extras and (new.specifier or not old.specifier):
        return requirement
    extras = ",".join(sorted(old.extras | new.extras))
    return f"{new.name}{f'[{extras}]' if extras else ''}{new.specifier or old.specifier}"


def read(text: str) -> list[Written]:
    """What the file lists, in its order; a line that cannot be installed has its problem."""
    lines = text.splitlines()
    found, number = [], 0
    while number < len(lines):
        first, parts = number, []
        while True:
            line = _COMMENT.sub("", lines[number].lstrip("\ufeff"))
            number += 1
            goes_on = line.endswith("\\") and number < len(lines)
            parts.append(line.removesuffix("\\") if goes_on else line)
            if not goes_on:
                break
        words = " ".join(part.strip() for part in parts if part.strip())
        if words:
            found.append(_written(first, number, words))
    return found


def _written(first: int, after: int, words: str) -> Written:
    words = _CREDENTIALS.sub("://***@", words)
    try:
        return Written(first, after, words, name_of(words))
    except RequirementRefused as problem:
        return Written(first, after, words, problem=f"line {first + 1}: {problem}")


def with_requirement(text: str, requirement: str) -> str:
    """The file with this requirement in it: in the place of the package's line, or after all others.

    A bare name says nothing that the package's own line does not say, and leaves it alone; extras in that line stay."""
    requirement = checked(requirement)
    name, end = name_of(requirement), _line_end(text)
    lines = text.splitlines(keepends=True)
    there = [entry for entry in read(text) if entry.name == name]
    if there and (is_bare(requirement) or there[0].text == requirement):
        return text
    if there:
        requirement = merged(there[-1].text, requirement)
    if not there:
        if lines and not lines[-1].endswith(("\n", "\r")):
            lines[-1] += end
        return "".join(lines) + requirement + end
    first, *more = there
    for entry in reversed(more):
        del lines[entry.first : entry.after]
    comment = _COMMENT.search(lines[first.after - 1].rstrip("\r\n"))
    kept = comment[0] if comment else ""
    bom = "\ufeff" if lines[first.first].startswith("\ufeff") else ""
    ended = end if lines[first.after - 1].endswith(("\n", "\r")) else ""
    lines[first.first : first.after] = [f"{bom}{requirement}{kept}{ended}"]
    return "".join(lines)


def without_requirement(text: str, name: str) -> str:
    """The file without the package's lines; the same text where it has none."""
    lines = text.splitlines(keepends=True)
    for entry in reversed([entry for entry in read(text) if entry.name == name]):
        del lines[entry.first : entry.after]
    return "".join(lines)


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
