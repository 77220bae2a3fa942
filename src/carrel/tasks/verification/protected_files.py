"""Decide which files of a workspace are the sample's own and are never taken from an agent."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from carrel.tasks.sample import Sample

_PATTERNS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("protected_patterns.toml").read_text("utf-8"))
"""Explained in that file."""
RUNNER_FILES: tuple[str, ...] = tuple(_PATTERNS["files_of_runners"])
RUNNER_FOLDERS: tuple[str, ...] = tuple(_PATTERNS["folders_of_runners"])
STEERING_FILES: tuple[str, ...] = tuple(_PATTERNS["steering_files"])
START_FILES: tuple[str, ...] = tuple(_PATTERNS["start_files"])
BUILD_SETTINGS: tuple[str, ...] = tuple(_PATTERNS["build_settings"])
TEST_FOLDERS: tuple[str, ...] = tuple(_PATTERNS["test_folders"])
TEST_FILES: tuple[str, ...] = tuple(_PATTERNS["test_files"])
CODE: tuple[str, ...] = tuple(_PATTERNS["code"])
BUILT: tuple[str, ...] = tuple(_PATTERNS["built_files"])
BUILT_FOLDERS: tuple[str, ...] = tuple(_PATTERNS["built_folders"])
LINTER_FILES: tuple[str, ...] = tuple(_PATTERNS["linter_files"])
TEST_TOOLS: tuple[str, ...] = tuple(_PATTERNS["test_tools"])
LINT_TOOLS: tuple[str, ...] = tuple(_PATTERNS["lint_tools"])
RUNNERS: tuple[str, ...] = tuple(_PATTERNS["command_tools"])
PACKAGE_KEYS: tuple[str, ...] = tuple(_PATTERNS["package_keys"])
RUN_BY: dict[str, list[str]] = _PATTERNS["run_by"]
_HEADER = re.compile(r"^\s*\[\[?\s*([^\]]*?)\s*\]")

Guard = Callable[[str, str, tuple[str, ...]], str | None]


def restore_test_settings(
    name: str, original: bytes | None, theirs: bytes, *, linting: bool = False, command: str = ""
) -> bytes | None:
    """Merge a settings file: the changed version, with the sample's test settings; None when they cannot be separated.

    `original` is None when the sample has no such file; `command` runs the tests.
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
    # A table can be written in other ways, which are not merged.
    data = tomllib.loads(merged)
    if _tools(data, tools) != _tools(before, tools) or _rest(data, tools) != _rest(after, tools):
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
    """`theirs` without the sections that `ours` selects, followed by those of `original`."""
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
    # The packages that the tests use have to stay; others may be added.
    return theirs if same and all(now.get(name) == wanted for name, wanted in needed.items()) else None


_REPLACED = re.compile(r"^\s*(?:replace\s+)?(\S+)(?:\s+v\S+)?\s+=>\s+(.+?)\s*(?://.*)?$", re.MULTILINE)


def _go_mod(original: str, theirs: str, tools: tuple[str, ...]) -> str | None:
    """A change must not replace modules that the sample uses by others."""
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


_WRAPPERS = ("env", "exec", "time", "nice", "command", "xvfb-run", "!")
_INTERPRETERS = r"(ba|da|z|k)?sh|python[\d.]*|node|deno|bun|ruby|perl|php|Rscript|lua|tclsh"
_ELF = b"\x7fELF"
_QUOTED = r'"(?:[^"\\\n]|\\.)*"'
"""A file name in a git diff that has quotes, control characters or, by default, characters outside ASCII."""
_PATCHED = re.compile(rf"^(?:---|\+\+\+) ({_QUOTED}|[^\t\n]+)", re.MULTILINE)
_RENAMED = re.compile(rf"^(?:rename|copy) (?:from|to) ({_QUOTED}|.+)$", re.MULTILINE)
_GIT_HEADER = re.compile(rf"^diff --git ({_QUOTED}|a/.+?) ({_QUOTED}|b/.+)$", re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def touched_by(patch: str) -> set[str]:
    """The paths that a patch changes, creates, removes or renames."""
    found = {re.sub("^[ab]/", "", _unquoted(name)) for name in _PATCHED.findall(patch)}
    found |= {_unquoted(name)[2:] for pair in _GIT_HEADER.findall(patch) for name in pair}
    found |= {_unquoted(name) for name in _RENAMED.findall(patch)}
    return found - {"/dev/null", "dev/null"}


def _unquoted(name: str) -> str:
    """Decode a file name in a git diff, where a quoted name has its bytes as escapes."""
    if len(name) < 2 or not name.startswith('"') or not name.endswith('"'):
        return name.strip()

    def byte(found: re.Match[bytes]) -> bytes:
        code = found[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(byte, name[1:-1].encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def programs_of(command: str) -> set[str]:
    """The programs that a command line runs, as paths: the first word of each part, and the script of an interpreter.

    Files that are only read (`mypy app.py`, `test -e app.py`) may be the source, and are not included.
    """
    found = set()
    for part in re.split(r"[;&|()\n]+", command):
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        words = [word for word in words if not re.match(r"\w+=", word) and word not in _WRAPPERS]
        if words[:1] and re.fullmatch(_INTERPRETERS, PurePosixPath(words[0]).name):
            scripts = [word for word in words[1:] if not word.startswith("-")][:1]
            words = scripts if not {"-m", "-c", "-e"} & set(words) else []
        found |= {str(PurePosixPath(word)) for word in words[:1]}
    return found


def is_root_test(path: str) -> bool:
    """Whether it is a program in the root folder that is named test or tests: `test.js`, `tests.sh`."""
    return "/" not in path and path.partition(".")[0].lower() in ("test", "tests") and _any((path,), CODE)


class SampleFolder:
    """The files that a sample starts with, on the host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def kind(self, path: str) -> Literal["file", "folder", "link"] | None:
        full = self.folder / path
        if full.is_symlink():
            return "link"
        return "folder" if full.is_dir() else "file" if full.exists() else None

    def children(self, path: str) -> Iterable[str]:
        for parent, folders, files in os.walk(self.folder / path):
            for name in [*files, *(name for name in folders if os.path.islink(os.path.join(parent, name)))]:
                yield os.path.relpath(os.path.join(parent, name), self.folder)

    def runs(self, path: str) -> bool:
        return self.kind(path) == "file" and os.access(self.folder / path, os.X_OK)

    def read(self, path: str) -> bytes | None:
        return (self.folder / path).read_bytes() if self.kind(path) == "file" else None


class Protection:
    """Decides which paths are a sample's own and are not taken from a change."""

    def __init__(
        self, sample: Sample, base: SampleFolder, modules: Iterable[str] = (), files: SampleFolder | None = None
    ) -> None:
        """`modules` are the modules of the sample's environment, without the standard library.

        `base` is the prepared workspace, `files` the sample's files; the other files in `base` come from the set-up."""
        self._sample = sample
        self._base = base
        self._files = files or base
        self._modules = {*sys.stdlib_module_names, *modules}
        self._source = touched_by(sample.patch) | touched_by(sample.non_code_patch)
        self._tests = touched_by(sample.test_patch)
        self._linting = sample.verifier in ("linter", "static_analysis")

    def protected_reason(self, path: str) -> str | None:
        """Why a change of this path is not judged; None when it is."""
        parts = PurePosixPath(path).parts
        if path in self._tests:
            return "a file of the hidden tests"
        if _matches(path, self._sample.verify.protected) or _matches(path, self._sample.verify.reports):
            return "protected by the sample"
        # Python finds metadata folders regardless of case.
        if _any(parts[-1:], RUNNER_FILES) or _any([part.lower() for part in parts], RUNNER_FOLDERS):
            return "it steers the test runner"
        if self._sample.verify.tests is not None:
            return None  # The tests are not in the workdir, and what is built there is a part of the work.
        if self._in_virtualenv(parts):
            return "a part of the environment that the tests run in"
        if self._linting and _any(parts[-1:], LINTER_FILES):
            return "it steers the linter"
        if path in self._source:
            return None
        if _any(parts, TEST_FOLDERS) or _any(parts[-1:], TEST_FILES) or path in self._named or is_root_test(path):
            return "a test"
        if _any(parts[-1:], BUILD_SETTINGS):
            return "it steers the test runner"
        if _any(parts[-1:], self._run_by):
            return "it defines how the tests are run"
        if parts[:1] == ("vendor",) and self._base.kind("vendor/modules.txt"):
            return "vendored code, which the tests use too"
        new = self._base.kind(path) is None
        if _any(parts[:1], BUILT_FOLDERS) and self._by_setup(parts[0]):
            return "built, not written; it is built again"
        if new and (_any(parts[-1:], BUILT) or (_any(parts[:1], BUILT_FOLDERS) and not self._base.kind(parts[0]))):
            return "built, not written; it is built again"
        if new and self._shadows(parts):
            return f"it would hide the installed module {_module(parts)}"
        return None

    def binary_reason(self, path: str, content: bytes) -> str | None:
        """Why a change with this content is not judged: it is a new compiled program."""
        is_work = path in self._source or self._sample.verify.tests is not None
        if content.startswith(_ELF) and not is_work and self._base.kind(path) is None:
            return "built, not written; it is built again"
        return None

    def is_test_code(self, path: str) -> bool:
        """Whether it is code of the tests, or settings of their runner: no honest run writes to these."""
        parts = PurePosixPath(path).parts
        if _any([part.lower() for part in parts[:-1]], RUNNER_FOLDERS) or self._by_setup(path):
            return False
        if path in self._named or _any(parts[-1:], (*RUNNER_FILES, *TEST_FILES)) or is_root_test(path):
            return path not in self._source
        return _any(parts[-1:], CODE) and (path in self._tests or _any(parts, TEST_FOLDERS))

    def steers_when_new(self, path: str) -> bool:
        """Whether a new file steers the test runner; code under test may try to create one."""
        *folders, name = PurePosixPath(path).parts
        if _any(folders, ("site-packages", "dist-packages")):
            # A virtualenv that was just created, as by `tox`, is not one of the sample's.
            return _any((name,), START_FILES) and self._base.kind("/".join(folders)) is not None
        if _any([part.lower() for part in folders], RUNNER_FOLDERS):
            return False
        if name.endswith(".py") and _any((name,), START_FILES):
            return True
        return _any((name,), STEERING_FILES) and tuple(folders) in self._test_folders

    def is_installed(self, path: str) -> bool:
        """Whether it is a module of a virtualenv in the workdir that existed before."""
        parts = PurePosixPath(path).parts
        site = _any(parts, ("site-packages", "dist-packages")) and "__pycache__" not in parts
        return site and path.endswith((".py", ".pth")) and self._base.kind(path) is not None

    @cached_property
    def _test_folders(self) -> set[tuple[str, ...]]:
        """The folders that contain tests, and their parents."""
        found: set[tuple[str, ...]] = {()}
        for path in [*self._base.children(""), *self._tests, *self._named]:
            folders = PurePosixPath(path).parts[:-1]
            if folders not in found and self.is_test_code(path):
                found |= {folders[:count] for count in range(len(folders) + 1)}
        return found

    def is_rebuilt(self, path: str) -> bool:
        """Whether the set-up has built it, and the test command builds it again."""
        if not self._made_by_make or path in self._source or not self._by_setup(path):
            return False
        return _any(PurePosixPath(path).parts[-1:], BUILT) or (self._base.read(path) or b"").startswith(_ELF)

    def _by_setup(self, path: str) -> bool:
        return self._base.kind(path) is not None and self._files.kind(path) is None

    def _in_virtualenv(self, parts: tuple[str, ...]) -> bool:
        return any(self._base.kind("/".join((*parts[:count], "pyvenv.cfg"))) for count in range(1, len(parts)))

    @cached_property
    def _named(self) -> set[str]:
        """Files that contain listed tests, and programs that the test command runs."""
        listed = [*self._sample.fail_to_pass, *self._sample.pass_to_pass]
        named = {name.partition("::")[0] for name in listed if "::" in name}
        named |= programs_of(self._sample.verify.command)
        return {name for name in named if self._base.kind(name) in ("file", "link")}

    @cached_property
    def _run_by(self) -> tuple[str, ...]:
        command = self._sample.verify.command
        found = [files for program, files in RUN_BY.items() if re.search(rf"(?<![\w.-])({program})(?![\w.-])", command)]
        return tuple(file for files in found for file in files)

    @cached_property
    def _made_by_make(self) -> bool:
        return re.search(r"\b(g?make|cmake|ctest|ninja|meson)\b", self._sample.verify.command) is not None

    @cached_property
    def _import_roots(self) -> set[tuple[str, ...]]:
        roots: set[tuple[str, ...]] = {(), ("src",), ("lib",), ("python",)}
        for folder in self._sample.environment.env.get("PYTHONPATH", "").split(":"):
            inside = folder.removeprefix(self._sample.environment.workdir).strip("/")
            roots.add(PurePosixPath(inside).parts if inside else ())
        return roots

    def _shadows(self, parts: tuple[str, ...]) -> bool:
        """Whether a new module in an import folder has the name of one that Python or the test runner needs."""
        for root in self._import_roots:
            inside = parts[len(root) :]
            if parts[: len(root)] != root or not inside or _module(inside) not in self._modules:
                continue
            # A package of the sample may have any name.
            if self._base.kind("/".join((*root, inside[0]))) is None and (
                len(inside) > 1 or re.search(r"\.(py|so|pyd|zip)$", inside[0])
            ):
                return True
        return False


def _module(parts: tuple[str, ...]) -> str:
    return parts[0].partition(".")[0] if len(parts) == 1 else parts[0]


def _any(names: Iterable[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """Match as in .gitignore, without `!`: a slash at the beginning or in the middle anchors a pattern to the root, one
    at the end restricts it to folders; a folder includes everything in it."""
    parts = PurePosixPath(path).parts
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    for pattern in patterns:
        bound = "/" in pattern.rstrip("/")
        folder = pattern.endswith(("/", "/**"))
        plain = pattern.strip("/").removesuffix("/**")
        names = above if bound else parts
        if any(_path_matches(name, plain) for name in (names[:-1] if folder else names)):
            return True
    return False


def _path_matches(path: str, pattern: str) -> bool:
    """Match one path; `*` does not match slashes, `**` does."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    regex = "".join(
        known.get(piece) or (piece.replace("[!", "[^") if piece.startswith("[") else re.escape(piece))
        for piece in pieces
    )
    return re.fullmatch(regex, path) is not None
