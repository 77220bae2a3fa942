"""Pure: which files of a commit are tests, which are source, and which are neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from carrel.tasks.protection import RUNNER_FILES, TEST_FILES, TEST_FOLDERS, is_root_test

TEST_SETTINGS = ("conftest.py", "pytest.ini", "jest.config.*", "vitest.config.*")
NO_CODE = ("*.md", "*.rst", "*.txt", "*.adoc", "*.png", "*.svg", "*.jpg", "*.gif", "LICENSE*", "CHANGES*", "CHANGELOG*")
NO_CODE_FOLDERS = ("docs", "doc", ".github", "changelog", "changes", "news", "newsfragments")
NO_SOLUTION = (*RUNNER_FILES, ".*", "*.lock", "package-lock.json", "pnpm-lock.yaml")
"""Settings of tools and runners, and lists of versions: a commit whose only other files are tests is no task."""
CODE_ALL_THE_SAME = ("requirements*.txt", "constraints*.txt", "CMakeLists.txt")


@dataclass(frozen=True)
class Parts:
    """The files of one commit."""

    source: tuple[str, ...]
    tests: tuple[str, ...]
    no_code: tuple[str, ...]


def split(paths: Iterable[str], test_patterns: Sequence[str] = ()) -> Parts:
    """By custom, and by patterns of whole paths for tests that lie elsewhere."""
    every = list(paths)
    tests = tuple(path for path in every if is_test(path, test_patterns))
    no_code = tuple(path for path in every if path not in tests and is_no_code(path))
    source = tuple(path for path in every if path not in tests and path not in no_code)
    return Parts(source, tests, no_code)


def is_test(path: str, patterns: Sequence[str] = ()) -> bool:
    *folders, name = path.split("/")
    return (
        any(fnmatchcase(path, pattern) for pattern in patterns)
        or any(folder.lower() in TEST_FOLDERS for folder in folders)
        or any(fnmatchcase(name, pattern) for pattern in (*TEST_FILES, *TEST_SETTINGS))
        or is_root_test(path)
    )


def is_no_code(path: str) -> bool:
    *folders, name = path.split("/")
    if any(fnmatchcase(name, pattern) for pattern in CODE_ALL_THE_SAME):
        return False
    return any(fnmatchcase(name, pattern) for pattern in NO_CODE) or (bool(folders) and folders[0] in NO_CODE_FOLDERS)


def can_solve(path: str) -> bool:
    """Whether a source file can make a test pass."""
    name = path.rpartition("/")[2]
    return not any(fnmatchcase(name, pattern) for pattern in NO_SOLUTION)
