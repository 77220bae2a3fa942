"""Remember a runner's functions before the project's code is imported, and find those that were replaced later.

Standard library only; Python 3.6 or later. Installed packages, `conftest.py` and the tests themselves may change a
runner: none of them ever comes from the agent. Any other code that replaces a function changes what passing means.
"""

import json
import os
import sys
import time
from types import FunctionType, MethodType
from typing import Any

_BEGUN, _stat = time.time(), os.stat
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_TEST_FOLDERS = frozenset(("tests", "test"))
_BUILTINS = (
    "AssertionError BaseException Exception all any callable getattr hasattr isinstance issubclass len setattr type"
)

_OF_OBJECTS = frozenset(("outcome", "longrepr", "when", "nodeid", "excinfo", "_result", "_obj", "__getattr__"))
"""Attributes of pytest's reports, calls and tests that are defined in no class."""


class KnownFunctions:
    """Functions and classes by their owner and name, with the code that they had."""

    def __init__(self, runner: Any = (), trusted: Any = ()) -> None:
        self._runner = tuple(runner)
        """Folders of the runner itself: its functions are expected only in their own places."""
        self._trusted = trusted
        """Folders and files of plugins that are not installed."""
        self._held = []  # type: list[Any]
        self._whole = []  # type: list[Any]

    def add_module(self, module: Any) -> None:
        """Remember its functions, and those of the classes that it defines."""
        for name, value in list(vars(module).items()):
            if isinstance(value, (FunctionType, type)):
                self._hold(module, module.__name__, name, value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                self.add_class(value)

    def add_class(self, kind: Any) -> None:
        for name, value in list(vars(kind).items()):
            if plain_function(value) is not None:
                self._hold(kind, kind.__module__ + "." + kind.__qualname__, name, value)

    def add_whole(self, kind: Any) -> None:
        """Remember a class that must not get new functions or properties that hide attributes of its objects."""
        self.add_class(kind)
        hidden = {name for each in kind.__mro__[1:] for name in vars(each)} | _OF_OBJECTS
        self._whole.append((kind, frozenset(hidden - set(vars(kind)))))

    def add(self, owner: Any, where: str, names: Any) -> None:
        for name in names:
            value = vars(owner).get(name)
            if value is not None:
                self._hold(owner, where, name, value)

    def add_builtins(self) -> None:
        self.add(sys.modules["builtins"], "builtins", _BUILTINS.split())

    def changed(self) -> str:
        """The name of the first function that was replaced; empty when there is none."""
        for owner, where, name, value, function, code in self._held:
            now = owner.__dict__.get(name)
            if now is not value:
                if function is not None and plain_function(now) is function and function.__code__ is code:
                    continue  # It was restored, and is only bound in another way.
                if not self.is_allowed(now):
                    return where + "." + name
            elif function is not None and function.__code__ is not code:
                return where + "." + name
        for kind, hidden in self._whole:
            for name in vars(kind).keys() & hidden:
                value = vars(kind)[name]
                if (callable(value) or isinstance(value, property)) and not self.is_allowed(value):
                    return kind.__module__ + "." + kind.__qualname__ + "." + name
        return ""

    def foreign_function(self, module: str, kinds: Any) -> str:
        """A function of these classes that is not from the file of its module; for modules that are loaded late."""
        home = sys.modules.get(module)
        for kind in [vars(home).get(name) for name in kinds] if home is not None else ():
            code = getattr(kind, "__code__", None)
            if not isinstance(kind, type) and code is not None and not is_of_others(code.co_filename):
                return module + "." + kind.__name__
            for name, value in list(vars(kind).items()) if isinstance(kind, type) else ():
                if callable(value) and not isinstance(value, type) and not self._is_of(home, value):
                    return kind.__module__ + "." + kind.__qualname__ + "." + name
        return ""

    def _is_of(self, home: Any, value: Any) -> bool:
        function = plain_function(value)
        file = getattr(home, "__file__", None) or ""
        if function is None:
            return type(value).__module__ != "unittest.mock"
        return not file.endswith(".py") or function.__code__.co_filename == file or self.is_allowed(value)

    def is_allowed(self, value: Any) -> bool:
        """Whether this function comes from code that may change the runner."""
        function = plain_function(value)
        if function is None:
            return False
        file = function.__code__.co_filename
        installed = is_installed(file) and not file.startswith(self._runner)
        return installed or may_change(file) or any(file.startswith(where) for where in self._trusted)

    def _hold(self, owner: Any, where: str, name: str, value: Any) -> None:
        function = plain_function(value)
        self._held.append((owner, where, name, value, function, getattr(function, "__code__", None)))


def plain_function(value: Any) -> Any:
    """The function in a method or a property; None when there is none."""
    if isinstance(value, (classmethod, staticmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def read_manifest() -> Any:
    """What the host says of the sample's files; without it, nothing can be compared."""
    try:
        with open(os.environ.get("CARREL_RECORDER_FILES", "")) as file:
            manifest = json.load(file)
        theirs = frozenset(manifest["theirs"])
        return {**manifest, "workdir": manifest["workdir"].rstrip("/") + "/", "theirs": theirs}
    except (OSError, ValueError, KeyError):
        return None


_MANIFEST = read_manifest()


def of_the_agent(file: str) -> str:
    """The path in the workdir of a file that the agent has changed; empty for any other file."""
    if _MANIFEST is None:
        return ""
    name = file[len(_MANIFEST["workdir"]) :] if file.startswith(_MANIFEST["workdir"]) else file
    return name if name in _MANIFEST["theirs"] else ""


def _is_older(file: str) -> bool:
    """Whether a file was there before the runner started, and is not the agent's."""
    while not of_the_agent(file):
        try:
            return _stat(file).st_ctime < _BEGUN
        except NotADirectoryError:
            file = os.path.dirname(file)  # in an archive of modules
        except (OSError, ValueError):
            return False
    return False


def is_installed(file: str) -> bool:
    return _is_named_installed(file) and _is_older(file)


def may_change(file: str) -> bool:
    """Whether the file has a name that is always protected: `conftest.py`, a test, a folder of tests."""
    return _is_named_test(file) and _is_older(file)


def is_of_others(file: str) -> bool:
    """Whether a file belongs to Python, an installed package or a test."""
    return is_trusted_name(file) and _is_older(file)


def is_trusted_name(file: str) -> bool:
    """Whether code from this file may change a runner, if the file is what it seems to be."""
    return file.startswith(_PYTHON) or _is_named_installed(file) or _is_named_test(file)


def _is_named_installed(file: str) -> bool:
    return any(os.sep + folder + os.sep in file for folder in ("site-packages", "dist-packages"))


def _is_named_test(file: str) -> bool:
    *folders, name = file.split(os.sep)
    return (
        name in ("conftest.py", "tests.py")
        or (name.startswith("test_") or name.endswith("_test.py"))
        or not _TEST_FOLDERS.isdisjoint(folders)
    )


LATE = (
    ("unittest.mock", ("NonCallableMock", "CallableMixin", "AsyncMockMixin", "Mock", "MagicMock", "AsyncMock")),
    ("unittest.async_case", ("IsolatedAsyncioTestCase",)),
)
"""Classes that unittest tests assert with; their modules are imported when first needed."""
LOOPS = (("asyncio", ("run",)), ("asyncio.runners", ("Runner",)), ("asyncio.base_events", ("BaseEventLoop",)))
"""What runs asynchronous tests."""


class KnownTests:
    """The functions of the tests as they were when they were collected."""

    def __init__(self, is_allowed: Any) -> None:
        self._may_stand = is_allowed
        self._held = {}  # type: dict[Any, Any]

    def add(self, kind: Any, name: str, function: Any) -> None:
        """`kind` is the class of the test, or None."""
        function = plain_function(function)
        key = (id(kind), name, id(function))
        if key not in self._held:
            owner = next((each for each in getattr(kind, "__mro__", ()) if name in vars(each)), None)
            value = vars(owner)[name] if owner is not None else None
            self._held[key] = (kind, owner, value, function, getattr(function, "__code__", None))

    def changed(self) -> str:
        return next((key[1] for key, held in self._held.items() if self._is_other(key[1], *held)), "")

    def _is_other(self, name: str, kind: Any, owner: Any, value: Any, function: Any, code: Any) -> bool:
        if function is not None and function.__code__ is not code:
            return True
        now = vars(owner).get(name) if owner is not None else value
        if now is value or plain_function(now) is plain_function(value) is not None or self._may_stand(now):
            return False
        return not getattr(now, "__unittest_skip__", False)  # A skipped test has not passed.
