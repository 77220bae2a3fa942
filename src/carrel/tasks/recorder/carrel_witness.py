"""A pytest plugin that runs where the tests run: it tells the host what really happened to each of them."""

import os
import sys
import time
from random import SystemRandom
from types import ModuleType
from typing import Any

import _pytest
import pluggy
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from carrel_canaries import lie_found
from carrel_recorder_compare import Comparison, Executed, file_of, modules_of, test_modules
from carrel_recorder_tracers import watch as watch_tracers
from carrel_speaking import HERE, call_into_workers, is_called_into_worker, speaker
from carrel_unchanged import LATE, Remembered, Tests, is_installed, may_change, plain

_BEGUN, _WORKDIR = time.time(), os.getcwd() + os.sep
_PYTEST = os.path.dirname(os.path.abspath(_pytest.__file__)) + os.sep
_PLUGGY = os.path.dirname(os.path.abspath(pluggy.__file__)) + os.sep
_MODULES = (
    "runner python reports unittest nodes main skipping outcomes fixtures junitxml doctest python_api raises subtests"
    " assertion assertion.rewrite _code.code"
)
_STEPS = {
    "runner": "runtestprotocol call_and_report call_runtest_hook check_interactive_exception collect_one_node"
    " pytest_runtest_protocol pytest_runtest_setup pytest_runtest_call pytest_runtest_makereport CallInfo TestReport",
    "python": "pytest_pyfunc_call Function async_warn_and_skip",
    "unittest": "TestCaseFunction pytest_runtest_makereport",
    "reports": "TestReport",
}
"""Between a test and what is said of it: looked at before and after each."""
_CLASSES = ("CallInfo", "TestReport", "BaseReport", "Function", "TestCaseFunction")
_DECIDING = (
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "pytest_runtest_logreport",
    "pytest_pyfunc_call",
)


def _origin(plugin: Any) -> str:
    """The file that a plugin is from."""
    module = plugin if isinstance(plugin, ModuleType) else sys.modules.get(str(getattr(plugin, "__module__", "")))
    return os.path.abspath(getattr(module, "__file__", None) or "?")


def _is_xdists(plugin: Any) -> bool:
    """It sends reports on as they are."""
    return os.sep + "xdist" + os.sep in _origin(plugin)


def _places(manager: Any) -> Any:
    """Where the plugins that are not installed are from: a file, or the folder of a package."""
    found = set()
    for file in {_origin(plugin) for plugin in manager.get_plugins()}:
        if not is_installed(file) and not file.startswith((_PYTEST, _PLUGGY)):
            folder = os.path.dirname(file)
            found.add(folder + os.sep if os.path.exists(os.path.join(folder, "__init__.py")) else file)
    return found


class _Watch:
    """What the runner is made of, and whether it is still that."""

    def __init__(self) -> None:
        self._trusted = set()  # type: set[str]
        self._steps, self._all = (Remembered((_PYTEST, _PLUGGY), self._trusted) for _ in range(2))
        self._tests = Tests(self._all.may_stand)
        self._known = {}  # type: dict[int, Any]
        self._first = set()  # type: set[int]
        self._plugins = set()  # type: set[int]
        self._called = {}  # type: dict[int, Any]
        executed = Executed()
        self._comparison = Comparison(executed)
        self.traced_by = set()  # type: set[str]
        watch_tracers(executed, self._comparison.workdir, self._comparison.theirs, self.traced_by)
        self._asked = set()  # type: set[str]
        modules = {name: sys.modules.get("_pytest." + name) for name in _MODULES.split()}
        for name, names in _STEPS.items():
            if modules[name] is None:
                continue
            self._steps.add(modules[name], "_pytest." + name, names.split())
            for kind in _CLASSES:
                made = vars(modules[name]).get(kind)
                if made is not None:
                    self._steps.add_whole(made)
        for module in (pytest, *modules.values(), *(sys.modules[name] for name in _runners())):
            if module is not None:
                self._all.add_module(module)
        self._all.add_builtins()

    def is_first(self, manager: Any) -> None:
        """What is registered before the sample's `conftest.py` is loaded, by whomever, is not the agent's."""
        if not self._first:
            self._first = {id(plugin) for plugin in manager.get_plugins()}
            self._trusted.update(_places(manager))
            self.begin(manager)

    def begin(self, manager: Any) -> None:
        """What is registered when the tests begin to be collected is the sample's."""
        self._plugins = {id(plugin) for plugin in manager.get_plugins()}
        for name in _DECIDING:
            for each in getattr(manager.hook, name).get_hookimpls():
                self._know(each)

    def _know(self, hook: Any) -> None:
        self._known.setdefault(id(hook), (hook, hook.function, getattr(plain(hook.function), "__code__", None)))

    def found(self, item: Any) -> None:
        """A test as it was collected."""
        function = getattr(item, "function", None)
        if isinstance(item, pytest.Function) and function is not None:
            self._tests.add(item.cls, getattr(item, "originalname", None) or item.name, function)
            self._called[id(item)] = (item, getattr(plain(item.obj), "__code__", None))

    def is_loaded_by(self, item: Any) -> str:
        """An import hook of the project's that finds the module of a test: asked once for each."""
        module = getattr(item, "module", None)
        name = getattr(module, "__name__", None)
        if name is None or name in self._asked:
            return ""
        self._asked.add(name)
        for finder in list(sys.meta_path):
            file = _origin(finder if isinstance(finder, type) else type(finder))
            theirs = file.startswith(_WORKDIR) and not is_installed(file) and not may_change(file)
            if theirs and finder.find_spec(name, None) is not None:
                return "the way to import " + name
        return ""

    def compare(self, session: Any, items: Any) -> Any:
        """What is not as the sample's files say, and the tests for which that cannot be told."""
        plugins = [each for each in session.config.pluginmanager.get_plugins() if isinstance(each, ModuleType)]
        modules = [each for each in plugins if os.path.basename(file_of(each)) == "conftest.py"]
        functions = [item for item in items if isinstance(item, pytest.Function)]
        for item in functions:
            modules += [item.module, *modules_of(item.cls)]
        modules = test_modules(modules)
        changed = self._comparison.prepare(modules, _is_rewritten, os.path.dirname(_PYTEST[:-1]), _has_hook(session))
        changed = changed or self._fixture_changed(session, functions, {file_of(each): each for each in modules})
        missed = []
        for item in items:
            why = "it is no function of Python's"
            if isinstance(item, pytest.Function):
                name = getattr(item, "originalname", None) or item.name.partition("[")[0]
                other, why = self._comparison.learn(
                    item, item.cls, name, item.obj, [each.func for _, each in _fixtures(item)]
                )
                changed = changed or other
            if why:
                missed.append((item.nodeid, why))
        return changed, missed

    def _fixture_changed(self, session: Any, functions: Any, modules: Any) -> str:
        all_of_them = {id(each): (name, each) for item in functions for name, each in _fixtures(item)}
        for name, each in all_of_them.values():
            base = os.path.join(str(session.config.rootdir), str(getattr(each, "baseid", "?")).partition("::")[0])
            file = base if base.endswith(".py") else os.path.join(base, "conftest.py")
            module = modules.get(os.path.abspath(file))
            if module is not None and self._comparison.fixture_differs(module, name, each.func):
                return "the fixture " + str(name)
        return ""

    def test_differs(self, item: Any) -> str:
        instance = getattr(item, "_instance", None) or getattr(item, "instance", None)
        return self._comparison.changed(item) or self._comparison.strange_method(instance)

    def step_changed(self, item: Any) -> str:
        changed = self._steps.changed() or self._instance_changed(item)
        return changed or self.test_differs(item) or self._hook_changed(item.config.pluginmanager)

    def changed_before(self, item: Any) -> str:
        """Before a test also what its file's names stand for, which a test itself may patch until it is torn down."""
        name = getattr(item, "originalname", None) or item.name.partition("[")[0]
        kind, module = getattr(item, "cls", None), getattr(item, "module", None)
        return self.step_changed(item) or self._comparison.binding_changed_for(kind, module, name)

    def anything_changed(self, session: Any) -> str:
        manager = session.config.pluginmanager
        changed = self._all.changed() or self._steps.changed() or self._hook_changed(manager) or self._test_changed()
        changed = changed or self._comparison.anything_changed()
        return changed or next(filter(None, (self._all.stranger(*late) for late in LATE)), "")

    def _test_changed(self) -> str:
        name = self._tests.changed()
        return name and "the test " + name

    def _instance_changed(self, item: Any) -> str:
        if not isinstance(item, pytest.Function):
            return ""
        for owner, name in ((item, "runtest"), (item.session, "gethookproxy")):
            own = vars(owner).get(name)
            if own is not None and not self._may_call(own):
                return name + " of " + str(item.nodeid)
        code, now = self._called.get(id(item), (item, None))[1], vars(item).get("_obj")
        if code is None or now is None or getattr(plain(now), "__code__", None) is code or self._may_call(now):
            return ""
        return "the test " + str(item.nodeid)

    def _may_call(self, value: Any) -> bool:
        """Plugins put something of their own around a test."""
        value = getattr(value, "func", value)
        return self._all.may_stand(value) or (plain(value) is None and is_installed(_origin(type(value))))

    def pytest_decides(self, config: Any) -> bool:
        """Whether nobody else whom the sample has asked has a say in what comes of a test."""
        names = [name for name in _DECIDING if name != "pytest_runtest_setup"]
        hooks = [each for name in names for each in getattr(config.hook, name).get_hookimpls()]
        return not any(self._is_asked(plugin) for plugin in [each.plugin for each in hooks] if not _is_xdists(plugin))

    def _is_asked(self, plugin: Any) -> bool:
        file = _origin(plugin)
        if file.startswith((_PYTEST, HERE)):
            return False
        return id(plugin) in self._first or is_installed(file) or may_change(file) or _asked_for(plugin)

    def is_deaf(self, plugin: Any) -> bool:
        """Canaries are not for what is the sample's own or installed: only for pytest, and for what may have got in."""
        return self._is_asked(plugin) or _origin(plugin).startswith(HERE)

    def _hook_changed(self, manager: Any) -> str:
        for name in _DECIDING:
            for each in getattr(manager.hook, name).get_hookimpls():
                known = self._known.get(id(each))
                if known is None:
                    if not self._may_come_late(each):
                        return name + ", by a plugin that was registered while the tests were collected or run"
                    self._know(each)
                elif each.function is not known[1] or getattr(plain(known[1]), "__code__", None) is not known[2]:
                    return name
        return ""

    def _may_come_late(self, hook: Any) -> bool:
        if id(hook.plugin) in self._plugins:
            return True
        file = os.path.abspath(getattr(getattr(plain(hook.function), "__code__", None), "co_filename", "?"))
        return is_installed(file) or file.startswith((_PYTEST, HERE)) or may_change(file) or _asked_for(hook.plugin)


def _is_rewritten(module: Any) -> bool:
    return isinstance(getattr(module, "__loader__", None), AssertionRewritingHook)


def _has_hook(session: Any) -> bool:
    try:
        return bool(session.config.getini("enable_assertion_pass_hook"))
    except (KeyError, ValueError):
        return False


def _fixtures(item: Any) -> Any:
    found = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return [(name, each) for name, made in found.items() for each in made]


def _asked_for(plugin: Any) -> bool:
    """Whether a module of the tests names it in its `pytest_plugins`."""
    name = getattr(plugin, "__name__", None)
    for module in list(sys.modules.values()):
        asked = getattr(module, "__dict__", {}).get("pytest_plugins")
        asked = [asked] if isinstance(asked, str) else asked
        if isinstance(asked, (list, tuple, set)) and name in asked and may_change(_origin(module)):
            return True
    return False


def _runners() -> Any:
    ours = ("unittest.case", "unittest.result", "unittest.suite")
    return [name for name in sorted(sys.modules) if name.startswith("pluggy.") or name in ours]


class _Witness:
    def __init__(self, say: Any, watch: Any) -> None:
        self._say, self._watch = say, watch
        self._items = []  # type: list[Any]
        self._tried_before = set()  # type: set[int]
        self._raised = set()  # type: set[int]
        self._failed = {}  # type: dict[str, Any]
        self._told = False
        self._is_compared = False

    def pytest_plugin_registered(self, plugin: Any) -> None:
        """A `conftest.py` that is younger than this run is none of the sample's."""
        file = _origin(plugin)
        ours = os.path.basename(file) == "conftest.py" and file.startswith(_WORKDIR) and os.path.exists(file)
        if ours and os.stat(file).st_ctime > _BEGUN:
            self._doubt(file + ", written while the tests ran,")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: Any) -> None:
        self._say(event="begun")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: Any) -> None:
        self._watch.begin(session.config.pluginmanager)

    @pytest.hookimpl(tryfirst=True)
    def pytest_itemcollected(self, item: Any) -> None:
        self._watch.found(item)
        self._look(self._watch.is_loaded_by, item)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: Any) -> None:
        """Canaries are tried before the first test and before two that chance names, and after the last."""
        self._items = list(session.items)
        between = SystemRandom().sample(self._items, min(2, len(self._items)))
        self._tried_before = {id(item) for item in [*self._items[:1], *between]}
        self._look(self._compare, session)

    def _compare(self, session: Any) -> str:
        try:
            changed, missed = self._watch.compare(session, self._items)
        except Exception as problem:  # noqa: BLE001 -- what cannot be compared does not end the run
            changed, missed = "", [("", type(problem).__name__ + ": " + str(problem))]
        for name, why in missed:
            self._say(event="uncompared", id=name, why=why)
        self._is_compared = True
        return str(changed)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        if id(item) in self._tried_before:
            self._try(item.session)
        else:
            self._look(self._watch.changed_before, item)
        yield

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
        outcome = yield
        if outcome.excinfo is not None:
            self._raised.add(id(pyfuncitem))

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        if call.when == "call":
            self._look(self._watch.step_changed, item)
        outcome = yield
        report = outcome.get_result() if outcome.excinfo is None else None
        if call.when == "call" and report is not None:
            raised = id(item) in self._raised
            self._raised.discard(id(item))
            lost = (raised and call.excinfo is None) or (call.excinfo is not None and report.outcome == "passed")
            self._failed.pop(item.nodeid, None)
            if report.outcome == "failed":
                self._failed[item.nodeid] = item.config
            if lost and self._watch.pytest_decides(item.config):
                self._doubt("what came of " + str(item.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        config = self._failed.pop(report.nodeid, None) if report.when == "call" else None
        if config is not None and report.outcome == "passed" and self._watch.pytest_decides(config):
            self._doubt("what came of " + str(report.nodeid))
        self._say(event="test", id=report.nodeid, when=report.when, outcome=report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say(event="test", id=report.nodeid, when="collect", outcome="failed")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self) -> None:
        call_into_workers()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """A worker of xdist's has its own witness, which has told it."""
        for what in (getattr(node, "workeroutput", None) or {}).get("carrel", ()):
            self._say(**what)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        yield
        self._end(session)
        self._say(event="finished", status=int(exitstatus))

    def _end(self, session: Any) -> None:
        self._try(session)
        for file in sorted(self._watch.traced_by):
            self._say(event="tracer", file=file)
        if self._items and not self._is_compared:
            self._say(event="uncompared", id="", why="they could not be looked at in memory")

    def _try(self, session: Any) -> None:
        self._look(self._watch.anything_changed, session)
        try:
            lie = self._lie(session)
        except Exception as problem:  # noqa: BLE001 -- whatever it is, the host is told
            self._say(event="canary", problem=f"{type(problem).__name__}: {problem}")
        else:
            self._say(event="canary", failed=not lie, lie=lie)

    def _lie(self, session: Any) -> str:
        plugins = session.config.pluginmanager.get_plugins()
        try:
            return lie_found(session, self._items, [each for each in plugins if self._watch.is_deaf(each)])
        except Exception:  # noqa: BLE001 -- a hook of the project's that wants more of a test than a canary has
            others = [each for each in plugins if not _origin(each).startswith(_PYTEST)]
            return lie_found(session, self._items, others)

    def _look(self, find: Any, where: Any) -> None:
        """What cannot be looked at is not in doubt, and does not end the run."""
        try:
            self._doubt(find(where))
        except Exception as problem:  # noqa: BLE001 -- the host is told
            self._say(event="unseen", problem=f"{type(problem).__name__}: {problem}")

    def _doubt(self, what: str) -> None:
        if what and not self._told:
            self._told = True
            self._say(event="changed", what=what)


class _InWorker(_Witness):
    """In a worker of xdist's, where what is found goes to the controller with the worker's own last words."""

    def __init__(self, watch: Any) -> None:
        self._found = []  # type: list[Any]
        super().__init__(self._keep, watch)

    def _keep(self, **what: Any) -> None:
        if what["event"] in ("changed", "canary", "uncompared", "tracer"):
            self._found.append(what)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        yield
        self._end(session)
        session.config.workeroutput["carrel"] = self._found


_say = speaker()
if _say is not None or is_called_into_worker():
    _watch = _Watch()

    def pytest_configure(config: Any, _say: Any = _say, _watch: Any = _watch) -> None:
        witness = _Witness(_say, _watch) if _say is not None else _InWorker(_watch)
        config.pluginmanager.register(witness, "carrel-witness-lines")

    def pytest_plugin_registered(manager: Any, _watch: Any = _watch) -> None:
        _watch.is_first(manager)

    del _watch
del _say
