"""Pure: project files that hold both source and test settings, with the settings put back as the sample has them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

TEST_TOOLS = ("pytest", "coverage", "tox", "nox", "cibuildwheel")
LINT_TOOLS = ("ruff", "mypy", "pylint", "flake8", "pyright", "basedpyright", "bandit", "black", "isort", "ty")
PACKAGE_KEYS = (
    *("scripts", "jest", "mocha", "ava", "vitest", "tap", "nyc", "c8"),
    *("eslintConfig", "wireit", "nx", "overrides", "resolutions", "pnpm", "babel", "jest-junit"),
)
_HEADER = re.compile(r"^\s*\[\[?\s*([^\]]*?)\s*\]")

RUNNERS = ("hatch", "pdm", "poe", "taskipy", "poetry", "rye", "pixi")
"""Programs that have commands of a project's own in their settings."""
Guard = Callable[[str, str, tuple[str, ...]], str | None]


def guarded(
    name: str, original: bytes | None, theirs: bytes, *, linting: bool = False, command: str = ""
) -> bytes | None:
    """The file as it may be judged with: theirs, with the sample's test settings; None to take the sample's whole.

    `original` is None where the sample has no such file; `command` is what runs the tests.
    """
    words = re.findall(r"[\w-]+", command)
    tools = (*TEST_TOOLS, *(LINT_TOOLS if linting else ()), *(runner for runner in RUNNERS if runner in words))
    guard = GUARDS.get(name)
    if guard is None:
        return theirs
    try:
        merged = guard((original or b"").decode("utf-8"), theirs.decode("utf-8"), tools)
    except (UnicodeDecodeError, ValueError, RecursionError, AttributeError, TypeError):
        return None
    return None if merged is None else merged.encode("utf-8")


def _pyproject(original: str, theirs: str, tools: tuple[str, ...]) -> str | None:
    before, after = tomllib.loads(original), tomllib.loads(theirs)
    if _tools(before, tools) == _tools(after, tools):
        return theirs
    named = re.compile(rf"\"?tool\"?\s*\.\s*\"?({'|'.join(tools)})\"?\s*(\.|$)")
    merged = _with_chunks_of(original, theirs, lambda header: named.match(header) is not None)
    # There are other ways to write a table; whoever uses one gets the sample's file.
    told = tomllib.loads(merged)
    if _tools(told, tools) != _tools(before, tools) or _rest(told, tools) != _rest(after, tools):
        return None
    return merged


def _tools(data: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    tool = data.get("tool", {})
    return {name: tool[name] for name in names if name in tool}


def _rest(data: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    tool = {name: value for name, value in data.get("tool", {}).items() if name not in names}
    return {**data, "tool": tool}


def _setup_cfg(original: str, theirs: str, tools: tuple[str, ...]) -> str | None:
    return _with_chunks_of(original, theirs, lambda header: any(word in header for word in (*tools, "aliases")))


def _with_chunks_of(original: str, theirs: str, ours: Callable[[str], bool]) -> str:
    """`theirs` without the sections that are ours, and those of `original` after it."""
    kept = "".join(text for header, text in _chunks(theirs) if not ours(header))
    back = "".join(text for header, text in _chunks(original) if ours(header))
    return kept + ("\n" if kept and not kept.endswith("\n") else "") + back


def _chunks(text: str) -> list[tuple[str, str]]:
    chunks: list[tuple[str, str]] = [("", "")]
    for line in text.splitlines(keepends=True):
        if header := _HEADER.match(line):
            chunks.append((header[1], line))
        else:
            chunks[-1] = (chunks[-1][0], chunks[-1][1] + line)
    return chunks


def _package_json(original: str, theirs: str, tools: tuple[str, ...]) -> str | None:
    before, after = json.loads(original or "{}"), json.loads(theirs)
    if {key: before.get(key) for key in PACKAGE_KEYS} == {key: after.get(key) for key in PACKAGE_KEYS}:
        return theirs
    merged = {key: value for key, value in after.items() if key not in PACKAGE_KEYS}
    merged |= {key: before[key] for key in PACKAGE_KEYS if key in before}
    return json.dumps(merged, indent=2) + "\n"


def _cargo_toml(original: str, theirs: str, tools: tuple[str, ...]) -> str | None:
    before, after = tomllib.loads(original), tomllib.loads(theirs)
    keys = ("test", "bench", "lib", "profile", "lints", "patch", "replace")
    needed, now = before.get("dev-dependencies", {}), after.get("dev-dependencies", {})
    same = all(before.get(key) == after.get(key) for key in keys)
    # What the tests are written with stays; more may come.
    return theirs if same and all(now.get(name) == wanted for name, wanted in needed.items()) else None


_REPLACED = re.compile(r"^\s*(?:replace\s+)?(\S+)(?:\s+v\S+)?\s+=>\s+(.+?)\s*(?://.*)?$", re.MULTILINE)


def _go_mod(original: str, theirs: str, tools: tuple[str, ...]) -> str | None:
    """Other modules in the place of those that the sample has are not for who is judged to choose."""
    before, after = set(_REPLACED.findall(original)), set(_REPLACED.findall(theirs))
    known = set(original.split())
    return theirs if before <= after and not any(name in known for name, _ in after - before) else None


GUARDS: dict[str, Guard] = {
    "pyproject.toml": _pyproject,
    "setup.cfg": _setup_cfg,
    "package.json": _package_json,
    "Cargo.toml": _cargo_toml,
    "go.mod": _go_mod,
}
