"""Compare the tests in memory with the sample's files, which are mounted where no code under test can write.

Standard library only; Python 3.6 or later. A separate process compiles the files. An audit hook, which cannot be
removed again, sees which code modules are made of and which file installs a tracer or a profiler.
"""

import json
import os
import sys
import types
from typing import Any

from carrel_code_digests import digest, plain_repr
from carrel_known_functions import (
    is_installed,
    is_of_others,
    is_trusted_name,
    may_change,
    of_the_agent,
    plain_function,
    read_manifest,
)

_HERE = os.path.dirname(os.path.abspath(__file__))
_Code, _stat, _spawn = types.CodeType, os.stat, getattr(os, "posix_spawn", None)
_pipe, _read, _write, _close, _wait, _loads, _dumps = (
    *(os.pipe, os.read, os.write, os.close, os.waitpid),
    *(json.loads, json.dumps),
)
_open = os.open
_PYTHON = [sys.executable, "-IB", *(["-" + "O" * sys.flags.optimize] if sys.flags.optimize else [])]
_ENV = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}


class Executed:
    """The code of each module that Python has executed, by file; fed by an audit hook."""

    def __init__(self) -> None:
        self.codes = {}  # type: dict[str, list[Any]]

    def note(self, code: Any) -> None:
        if type(code) is _Code and code.co_name == "<module>":
            self.codes.setdefault(code.co_filename, []).append(code)


class CodeComparison:
    """What the sample's test files compile to, and the functions that are in memory."""

    def __init__(self, executed: Executed) -> None:
        self._executed = executed
        self._tables = {}  # type: dict[str, Any]
        self._seen = {}  # type: dict[int, Any]
        self._sure = []  # type: list[Any]
        self._sure_of = {}  # type: dict[Any, list[Any]]
        """The same by (file, test), so that each test is checked against its own entries. (file, "") has the functions
        of a test file that are not tests; ("", "") has those of other files."""
        self._patched = set()  # type: set[str]
        """Attributes that test files set themselves; `self.name` for one of a test object."""
        self._why = self.workdir = ""
        self.theirs = frozenset()  # type: Any
        """The files that the agent has changed."""
        manifest = read_manifest()
        if manifest is None:
            self._why = "the sample's files are not available"
        else:
            self.workdir = manifest["workdir"]
            self._folders = (manifest["patched"], manifest["base"])
            self.theirs = manifest["theirs"]
        self._modules = dict(sys.modules)
        """The modules that were imported before any code of the project."""
        self._bound = {}  # type: dict[str, dict[str, Any]]
        """What the imports of each test file have bound, when they were first seen."""

    def prepare(self, modules: Any, rewrites: Any, pytest_at: str = "", hook: bool = False) -> str:
        """Compile the files of these modules. Returns the name of something in memory that differs from its file."""
        request = []
        for module in modules:
            file = file_of(module)
            known = self._pristine(file)
            if known and file not in self._tables and not self._is_as_it_was(file):
                self._tables[file] = {"problem": "its file was written to before it was loaded"}
            elif known and file not in self._tables:
                self._tables[file] = {"problem": "it could not be compiled"}
                request.append([file, known, bool(rewrites(module))])
        if request:
            made = _compiled({"files": request, "pytest": pytest_at, "hook": hook})
            self._tables.update(made)
            self._patched.update(*(table.get("patched", ()) for table in made.values()))
        return next(filter(None, (self._module_differs(module) for module in modules)), "")

    def _pristine(self, file: str) -> str:
        """The path of the sample's own version of a file; empty when the sample has none."""
        name = file[len(self.workdir) :] if not self._why and file.startswith(self.workdir) else ""
        if not name or not name.endswith(".py") or name in self.theirs:
            return ""
        for folder in self._folders:
            try:
                _stat(folder + "/" + name)
            except OSError:
                continue
            return str(folder + "/" + name)
        return ""

    def steering_file(self, file: str) -> str:
        """The path in the workdir of a file that steers the runner and is not one of the sample's; empty otherwise."""
        name = file[len(self.workdir) :] if not self._why and file.startswith(self.workdir) else ""
        for folder in self._folders if name and name not in self.theirs else ():
            try:
                _stat(folder + "/" + name)
            except OSError:
                continue
            return ""
        return "" if name in self.theirs else name

    def _is_as_it_was(self, file: str) -> bool:
        """Whether a file is as in the sample; a test command may write to it before it starts the runner."""
        try:
            return _content(file) == _content(self._pristine(file))
        except OSError:
            return True

    def _table(self, file: str) -> Any:
        table = self._tables.get(file)
        return table if table is not None and "all" in table else None

    def _module_differs(self, module: Any) -> str:
        table = self._table(file_of(module))
        if table is None:
            return ""
        run = self._executed.codes.get(file_of(module), ())
        if any(digest(code) != table["module"] for code in run):
            return "the code of " + module.__name__
        for path, about in table["defs"].items():
            owner, name = _owner(module, path)
            value = getattr(owner, "__dict__", {}).get(name)
            function = plain_function(value)
            if function is None or not self._is_sure(owner, name, about):
                continue
            if self._is_other(function, about):
                return path + " of " + module.__name__
            sure = (owner, name, value, function, function.__code__, about, path + " of " + module.__name__)
            self._sure.append(sure)
            file = file_of(module) if _has_tests(file_of(module)) else ""
            self._sure_of.setdefault((file, name if file and name.startswith("test") else ""), []).append(sure)
        return ""

    def _is_sure(self, owner: Any, name: str, about: Any) -> bool:
        """Whether the name can only refer to this function of the file."""
        return about["sure"] and name not in self._patched and not _is_made_over(owner)

    def _is_other(self, function: Any, about: Any) -> bool:
        """Whether it is neither from the file nor set by an installed package or a test."""
        if digest(function.__code__) in about["codes"]:
            return _defaults_differ(function, about)
        return self._is_foreign(function.__code__)

    def _is_foreign(self, code: Any) -> bool:
        file = code.co_filename
        table = self._table(os.path.abspath(file))
        if table is not None:
            return digest(code) not in table["all"]
        return not is_of_others(file)

    def misbound(self, *modules: Any) -> str:
        """A name in a test file that does not refer to what the file says; empty when there is none.

        Only what is certain by the file alone is compared: imports, constants, and names of Python's own functions."""
        return next((why for module in modules for why in self._misbound(module)), "")

    def _misbound(self, module: Any) -> Any:
        file, names, builtins = file_of(module), getattr(module, "__dict__", {}), self._modules["builtins"].__dict__
        table = self._table(file)
        if table is None:
            return
        where = " of " + module.__name__ + " is not what its file says"
        for name, wanted in table["constants"].items():
            if name in names and name not in self._patched and plain_repr(names[name]) != wanted:
                yield name + where
        if table["names"] is not None:
            for name in builtins.keys() & names.keys() - set(table["names"]):
                if name[:2] != "__" and names[name] is not builtins[name] and not _is_from_others(names[name]):
                    yield name + where
        bound = self._bound.setdefault(file, {})
        for name, (source, part) in table["imports"].items():
            value = names.get(name)
            if name in self._patched or not (callable(value) or isinstance(value, types.ModuleType)):
                continue
            if name not in bound:
                home = self._modules.get(source)
                bound[name] = value if home is None else getattr(home, part, value) if part else home
            if value is not bound[name] and not _is_from_others(value):
                yield name + where

    def binding_changed_for(self, kind: Any, module: Any, name: str) -> str:
        """The name of a replaced function that this test may call; fast enough to run for each test."""
        files = {file_of(each) for each in (module, *modules_of(kind)) if each is not None}
        keys = [("", ""), *((file, part) for file in files for part in ("", name))]
        return next(filter(None, (self._binding_changed(self._sure_of.get(key, ())) for key in keys)), "")

    def _binding_changed(self, sure: Any) -> str:
        for owner, name, value, function, code, _, where in sure:
            now = owner.__dict__.get(name)
            if name in self._patched:
                continue
            if now is not value and plain_function(now) is not None and self._is_foreign(plain_function(now).__code__):
                return str(where)
            if function.__code__ is not code and self._is_foreign(function.__code__):
                return str(where)
        return ""

    def anything_changed(self) -> str:
        return self._binding_changed(self._sure) or next(
            (str(each[-1]) for each in self._sure if self._is_other(each[3], each[-2])), ""
        )

    def register_test(self, test: Any, kind: Any, name: str, function: Any, fixtures: Any = ()) -> Any:
        """Remember the functions of a test. Returns (what was changed, why the test cannot be compared)."""
        function = plain_function(function)
        owner = next((each for each in getattr(kind, "__mro__", ()) if name in vars(each)), None)
        module = sys.modules.get(getattr(owner, "__module__", None) or getattr(function, "__module__", None) or "")
        if self._why:
            return "", self._why
        file = file_of(module)
        table = self._table(file)
        if table is None:
            return "", self._tables.get(file, {}).get("problem") or "its file is not one of the sample's tests"
        path = (owner.__qualname__ + "." if owner is not None else "") + name
        about = table["defs"].get(path)
        if file not in self._executed.codes:
            return "", "its file was loaded in a way that could not be seen"
        if about is None:
            return "", "no function of its file has its name"
        why = self.misbound(module)
        if why:
            return "", why
        made_of = [each for each in _unwrapped(function) if digest(each.__code__) in about["codes"]]
        if not made_of:
            sure = self._is_sure(owner, name, about)
            foreign = sure and (function is None or self._is_foreign(function.__code__))
            return ("the test " + str(name) if foreign else ""), "what its decorators made of it hides it"
        made_of += [each for each in map(plain_function, fixtures) if each is not None and self._is_known(each)]
        self._seen[id(test)] = (test, name, [(each, digest(each.__code__)) for each in made_of])
        return "", ""

    def _is_known(self, function: Any) -> bool:
        table = self._table(os.path.abspath(function.__code__.co_filename))
        return table is not None and digest(function.__code__) in table["all"]

    def fixture_differs(self, module: Any, name: str, function: Any) -> bool:
        """Whether the fixture of this name is another function than the one in the conftest or test file."""
        table = self._table(file_of(module))
        about = table["defs"].get(name) if table is not None else None
        function = plain_function(function)
        if about is None or function is None or digest(function.__code__) in about["codes"]:
            return False
        return self._is_foreign(function.__code__)

    def strange_method(self, test: Any) -> str:
        """A function set on the test object that hides a method of its class, from the code under test."""
        for name, value in list(getattr(test, "__dict__", {}).items()):
            function = plain_function(getattr(value, "func", value))
            if function is None or not callable(getattr(type(test), name, None)) or "self." + name in self._patched:
                continue
            file = function.__code__.co_filename
            if not is_of_others(file) and not (self._pristine(file) and self._is_as_it_was(file)):
                return name + " of " + type(test).__qualname__
        return ""

    def changed(self, test: Any) -> str:
        """Whether the code of this test or of its fixtures was changed since it was collected."""
        _, name, made_of = self._seen.get(id(test), (test, "", ()))
        return "the test " + str(name) if any(digest(each.__code__) != was for each, was in made_of) else ""


def _has_tests(file: str) -> bool:
    name = os.path.basename(file)
    return name.startswith("test") or name.endswith("_test.py")


def file_of(module: Any) -> str:
    return os.path.abspath(str(getattr(module, "__file__", None) or "?"))


def test_modules(modules: Any) -> Any:
    """These modules, and all others in memory whose files have names like tests or their helpers."""
    found = {id(each): each for each in modules if each is not None}
    for each in list(sys.modules.values()):
        if isinstance(each, types.ModuleType) and may_change(file_of(each)) and not is_installed(file_of(each)):
            found.setdefault(id(each), each)
    return list(found.values())


def modules_of(kind: Any) -> Any:
    """The modules of a test's class and its base classes."""
    return [sys.modules.get(each.__module__) for each in getattr(kind, "__mro__", ())]


def _content(file: str) -> bytes:
    opened, parts = _open(file, os.O_RDONLY), []
    try:
        while not parts or parts[-1]:
            parts.append(_read(opened, 1 << 16))
    finally:
        _close(opened)
    return b"".join(parts)


def _is_made_over(owner: Any) -> bool:
    """Whether a metaclass or an `__init_subclass__` of the project may have changed the class's functions."""
    if not isinstance(owner, type):
        return False
    hooks = [getattr(type(owner), "__new__", None), getattr(type(owner), "__init__", None), type(owner).__call__]
    hooks.append(getattr(owner, "__init_subclass__", None))
    return any(
        plain_function(each) is not None and not is_of_others(plain_function(each).__code__.co_filename)
        for each in hooks
    )


def _owner(module: Any, path: str) -> Any:
    *above, name = path.split(".")
    owner = module
    for each in above:
        owner = getattr(owner, "__dict__", {}).get(each)
    return owner, name


def _unwrapped(function: Any) -> Any:
    """The function and those that its decorators wrap."""
    waiting, seen = [function], []  # type: list[Any], list[Any]
    while waiting and len(seen) < 50:
        each = plain_function(getattr(waiting[0], "func", waiting[0]))
        del waiting[0]
        if each is None or any(each is known for known in seen):
            continue
        seen.append(each)
        waiting.append(each.__dict__.get("__wrapped__"))
        waiting.append(getattr(each.__dict__.get("hypothesis"), "inner_test", None))
        for cell in each.__closure__ or ():
            try:
                waiting.append(cell.cell_contents)
            except ValueError:
                continue
    return seen


def _defaults_differ(function: Any, about: Any) -> bool:
    values = function.__defaults__ or ()
    if len(values) != len(about["defaults"]):
        return True
    if any(wanted is not None and repr(value) != wanted for value, wanted in zip(values, about["defaults"])):  # noqa: B905
        return True
    named = function.__kwdefaults__ or {}
    wanted = {name: value for name, value in about["names"].items() if value is not None and name in named}
    return any(repr(named[name]) != value for name, value in wanted.items())


def _compiled(request: Any) -> Any:
    """Compile in a new process, in which no code under test has run."""
    if _spawn is None:
        return {}
    inside, out = _pipe(), _pipe()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, inside[0], 0), (os.POSIX_SPAWN_DUP2, out[1], 1)]
        words = [*_PYTHON, os.path.join(_HERE, "carrel_compile.py")]
        pid = _spawn(_PYTHON[0], words, _ENV, file_actions=actions)
        _close(inside[0])
        _close(out[1])
        text = _dumps(request).encode("ascii")
        while text:
            text = text[_write(inside[1], text) :]
        _close(inside[1])
        parts = []
        while True:
            part = _read(out[0], 1 << 16)
            if not part:
                break
            parts.append(part)
        _wait(pid, 0)
        return _loads(b"".join(parts))
    except (OSError, ValueError):
        return {}
    finally:
        _close(out[0])


def _is_from_others(value: Any) -> bool:
    function = plain_function(value)
    home = sys.modules.get(str(getattr(value if isinstance(value, type) else type(value), "__module__", "")))
    return is_of_others(function.__code__.co_filename if function is not None else file_of(home))


_EVENTS = frozenset(("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback"))
_MAKING = frozenset(("compile", "exec", "code.__new__"))
_DOCTEST = os.path.join(os.path.dirname(os.__file__), "doctest.py")
_frame, _getpid = sys._getframe, os.getpid


def install_audit_hook(executed: Executed, found: Any, forged: Any) -> None:
    """Add to `found` the agent's files that are on the stack when a tracer or a profiler is installed, and to `forged`
    those that make code which claims to be from a file of the tests or of an installed package."""
    add = getattr(sys, "addaudithook", None)
    if add is None:
        return
    owner, note = _getpid(), executed.note

    def hook(event: str, values: Any) -> None:
        if event == "exec":
            note(values[0])
        if event in _MAKING:
            claimed = values[0].co_filename if event == "exec" else values[1]
            if type(claimed) is str and is_trusted_name(claimed) and _getpid() == owner:
                agents = _agents_on_stack(_frame(0).f_back)
                if agents and event == "compile" and type(values[0]) is bytes and _is_content(claimed, values[0]):
                    agents = set()
                forged.update(agents if event == "compile" else _agents_on_stack(_frame(0).f_back, direct=True))
        elif event in _EVENTS and _getpid() == owner and _frame(1).f_code.co_filename != _DOCTEST:
            found.update(_agents_on_stack(_frame(1)))

    add(hook)


def _is_content(file: str, source: bytes) -> bool:
    try:
        return _content(file) == source
    except OSError:
        return False


def _agents_on_stack(frame: Any, direct: bool = False) -> Any:
    """The agent's files on the stack; if `direct`, only up to the frame of an import."""
    found = set()
    while frame is not None and not (direct and frame.f_code.co_filename.startswith("<frozen ")):
        found.add(of_the_agent(frame.f_code.co_filename))
        frame = frame.f_back
    return found - {""}
