"""What a repository's files say: which are tests, how its tests run, and which options may help."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from carrel.tasks.git_history import Git, GitFailed
from carrel.tasks.sample import SampleEnvironment
from carrel.tasks.verification.protected_files import RUNNER_FILES, TEST_FILES, TEST_FOLDERS, is_root_test

TEST_SETTINGS = ("conftest.py", "pytest.ini", "jest.config.*", "vitest.config.*")
NO_CODE = ("*.md", "*.rst", "*.txt", "*.adoc", "*.png", "*.svg", "*.jpg", "*.gif", "LICENSE*", "CHANGES*", "CHANGELOG*")
NO_CODE_FOLDERS = ("docs", "doc", ".github", "changelog", "changes", "news", "newsfragments")
NO_SOLUTION = (*RUNNER_FILES, ".*", "*.lock", "package-lock.json", "pnpm-lock.yaml")
"""Settings of tools and runners, and lock files: changing only these and tests makes no task."""
CODE_IN_SPITE_OF_ITS_NAME = ("requirements*.txt", "constraints*.txt", "CMakeLists.txt")


@dataclass(frozen=True)
class CommitFiles:
    """The files of one commit."""

    source: tuple[str, ...]
    tests: tuple[str, ...]
    no_code: tuple[str, ...]


def split(paths: Iterable[str], test_patterns: Sequence[str] = ()) -> CommitFiles:
    """Sort the paths by conventional names, and by `test_patterns` for tests in other places."""
    every = list(paths)
    tests = tuple(path for path in every if is_test(path, test_patterns))
    no_code = tuple(path for path in every if path not in tests and is_no_code(path))
    source = tuple(path for path in every if path not in tests and path not in no_code)
    return CommitFiles(source, tests, no_code)


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
    if any(fnmatchcase(name, pattern) for pattern in CODE_IN_SPITE_OF_ITS_NAME):
        return False
    return any(fnmatchcase(name, pattern) for pattern in NO_CODE) or (bool(folders) and folders[0] in NO_CODE_FOLDERS)


def can_solve(path: str) -> bool:
    """Whether a source file can make a test pass."""
    name = path.rpartition("/")[2]
    return not any(fnmatchcase(name, pattern) for pattern in NO_SOLUTION)


TEST_GROUPS = ("tests", "test", "testing", "dev")
"""Names of extras and dependency groups with what tests need, the most likely first."""
CONTINUE = "--continue-on-collection-errors"
_MISSING_IN_PYTHON = re.compile(
    r"cannot import name|PackageNotFound|unrecognized arguments|Unknown pytest|not found in `markers`"
)
_MISSING_MODULE = re.compile(r"No module named '?(\w+)")
_NO_TEST_COLLECTED = "the report has no test; the command ended with 5"
"""The reason when pytest collects no test: its exit code is 5 then."""
_COLLECTED_BY_PYTEST = ("test_*.py", "*_test.py")
_MISSING_IN_NODE = re.compile(r"Cannot find (?:module|package)|ERR_MODULE_NOT_FOUND|not found: \w+")
_NOT_FOR_TESTS = ("mypy", "pre-commit", "ruff", "black", "tox", "nox", "sphinx", "furo", "twine", "build")


def with_layout(settings: Mapping[str, Any], git: Git, commit: str, tests: Iterable[str]) -> dict[str, Any]:
    """Add what the layout of a Python repository needs to the settings; given values stay.

    A `src` folder with modules is put on PYTHONPATH. pytest continues when a test file cannot be imported."""
    if not any(path.endswith(".py") for path in tests):
        return dict(settings)
    environment = dict(settings.get("environment") or {})
    env = dict(environment.get("env") or {})
    workdir = environment.get("workdir") or SampleEnvironment().workdir
    if "PYTHONPATH" not in env and has_modules(_names(git, commit, "src/")):
        env["PYTHONPATH"] = f"{workdir}/src"
    options = str(env.get("PYTEST_ADDOPTS", ""))
    if CONTINUE not in options:
        env["PYTEST_ADDOPTS"] = f"{options} {CONTINUE}".strip()
    return {**settings, "environment": {**environment, "env": env}}


def has_modules(paths: Iterable[str]) -> bool:
    """Whether these paths below `src` hold Python modules or packages."""
    return any(re.fullmatch(r"src/([^/]+/__init__|[^/]+)\.py", path) for path in paths)


def proposal(
    git: Git, commit: str, reasons: Iterable[str], tests: Iterable[str] = (), settings: Mapping[str, Any] | None = None
) -> str:
    """Options of `carrel datasets import` that may help; empty when the reasons name nothing that options can fix.

    `tests` are the test files of the commits that were left out; what is in `settings` is not proposed again."""
    text = "\n".join(reasons)
    if _NO_TEST_COLLECTED in text and (named := _not_collected(tests)):
        return f'--test-command "python -m pytest -q --junitxml={{report}} {named}" --dep pytest'
    try:
        top = set(_names(git, commit))
        if "package.json" in top and _MISSING_IN_NODE.search(text):
            command = "npm ci" if "package-lock.json" in top else "npm install"
            return _not_given([f'--setup "{command}"'], settings)
        if not _is_missing_in_python(text):
            return ""
        project = _pyproject(git, commit) if "pyproject.toml" in top else {}
        below_src = _names(git, commit, "src/")
    except (GitFailed, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return ""
    options = _not_given(options_for(project, "setup.py" in top), settings)
    own = {name.removeprefix("src/").partition("/")[0].removesuffix(".py") for name in (*top, *below_src)}
    modules = [name for name in _missing_modules(text) if name not in own]
    if options or not modules:
        return options
    # The names of a package and of its module may differ, so the package is not guessed.
    return f"--dep PACKAGE with the package that has the module {' and the one that has '.join(modules)}"


def _not_given(options: Iterable[str], settings: Mapping[str, Any] | None) -> str:
    environment = (settings or {}).get("environment") or {}
    given = {f'--setup "{command}"' for command in environment.get("setup") or ()}
    given |= {f"--dep {shlex.quote(package)}" for package in environment.get("deps") or ()}
    return " ".join(option for option in options if option not in given)


def _is_missing_in_python(text: str) -> bool:
    """Whether something is missing that can be installed."""
    return bool(_missing_modules(text)) or _MISSING_IN_PYTHON.search(text) is not None


def _missing_modules(text: str) -> list[str]:
    """Modules that were not found, without those that this Python was built without."""
    return [name for name in dict.fromkeys(_MISSING_MODULE.findall(text)) if name not in sys.stdlib_module_names]


def _not_collected(tests: Iterable[str]) -> str:
    """Python test files that pytest only collects when its command names them."""
    names = {path: path.rpartition("/")[2] for path in tests if path.endswith(".py")}
    odd = [path for path, name in names.items() if not any(fnmatchcase(name, each) for each in _COLLECTED_BY_PYTEST)]
    return shlex.join(sorted(odd))


def options_for(project: Mapping[str, Any], has_setup_py: bool) -> list[str]:
    """Options to install the project and what its tests need, from its `pyproject.toml`."""
    options = []
    extras = (project.get("project") or {}).get("optional-dependencies") or {}
    groups = project.get("dependency-groups") or {}
    extra = next((name for name in TEST_GROUPS if name in extras), "")
    if has_setup_py or "project" in project or "build-system" in project:
        what = f"pip install -e '.[{extra}]'" if extra else "pip install -e ."
        options.append(f'--setup "{what}"')
    group = next((name for name in TEST_GROUPS if name in groups), "")
    if group and not extra:
        options += [f"--dep {shlex.quote(wanted)}" for wanted in _requirements(groups, group)]
    return options


def _requirements(groups: Mapping[str, Any], group: str, seen: Sequence[str] = ()) -> list[str]:
    """The requirements of a group, with those of the groups that it includes."""
    found: list[str] = []
    for entry in groups.get(group) or []:
        if isinstance(entry, Mapping) and entry.get("include-group") in groups and group not in seen:
            found += _requirements(groups, str(entry["include-group"]), (*seen, group))
        elif isinstance(entry, str):
            try:
                wanted = Requirement(entry)
            except InvalidRequirement:
                continue
            if wanted.name.lower() not in _NOT_FOR_TESTS and (wanted.marker is None or wanted.marker.evaluate()):
                wanted.marker = None
                found.append(str(wanted))
    return list(dict.fromkeys(found))


def _pyproject(git: Git, commit: str) -> dict[str, Any]:
    return tomllib.loads(git("show", f"{commit}:pyproject.toml").decode())


def _names(git: Git, commit: str, below: str = "") -> list[str]:
    """The files of a commit: those at the top, or all below a folder."""
    words = ["-r", "--", below] if below else []
    return git("ls-tree", "-z", "--name-only", commit, *words).decode("utf-8", "surrogateescape").split("\0")
