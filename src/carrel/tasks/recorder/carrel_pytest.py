"""A pytest plugin that records what really happened to each test and sends it to the host."""

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
from carrel_canaries import find_lie
from carrel_channel import HERE, enable_in_workers, is_xdist_worker, open_channel
from carrel_comparison import CodeComparison, Executed, file_of, install_audit_hook, modules_of, test_modules
from carrel_known_functions import LATE, LOOPS, KnownFunctions, KnownTests, is_installed, may_change, plain_function

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
"""The steps between a test and its report: checked before and after each test."""
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
    """The file that defines a plugin."""
    module = plugin if isinstance(plugin, ModuleType) else sys.modules.get(str(getattr(plugin, "__module__", "")))
    return os.path.abspath(getattr(module, "__file__", None) or "?")


def _is_from_xdist(plugin: Any) -> bool:
    """pytest-xdist passes reports on unchanged."""
    return os.sep + "xdist" + os.sep in _origin(plugin)


def _trusted_files(manager: Any) -> Any:
    """The files, or package folders, of the plugins that are not installed packages."""
    found = set()
    for file in {_origin(plugin) for plugin in manager.get_plugins()}:
        if not is_installed(file) and not file.startswith((_PYTEST, _PLUGGY)):
            folder = os.path.dirname(file)
            found.add(folder + os.sep if os.path.exists(os.path.join(folder, "__init__.py")) else file)
    return found


class _Watch:
    """The functions of the runner and of the tests, and whether they were changed."""

    def __init__(self) -> None:
        self._trusted = set()  # type: set[str]
        self._steps, self._all = (KnownFunctions((_PYTEST, _PLUGGY), self._trusted) for _ in range(2))
        self._tests = KnownTests(self._all.is_allowed)
        self._known = {}  # type: dict[int, Any]
        self._first = set()  # type: set[int]
        self._plugins = set()  # type: set[int]
        self._called = {}  # type: dict[int, Any]
        executed = Executed()
        self._comparison = CodeComparison(executed)
        self.traced_by, self._forged_by = set(), set()  # type: set[str], set[str]
        install_audit_hook(executed, self.traced_by, self._forged_by)
        self._collected = {}  # type: dict[int, Any]
        self._checked_modules = set()  # type: set[str]
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
        """Trust the plugins that are registered before the sample's `conftest.py` is loaded."""
        if not self._first:
            self._first = {id(plugin) for plugin in manager.get_plugins()}
            self._trusted.update(_trusted_files(manager))
            self.begin(manager)

    def begin(self, manager: Any) -> None:
        """Trust the plugins that are registered when collection starts: they come from the sample."""
        self._plugins = {id(plugin) for plugin in manager.get_plugins()}
        for name in _DECIDING:
            for each in getattr(manager.hook, name).get_hookimpls():
                self._know(each)

    def _know(self, hook: Any) -> None:
        self._known.setdefault(
            id(hook), (hook, hook.function, getattr(plain_function(hook.function), "__code__", None))
        )

    def found(self, item: Any) -> None:
        """Remember a test as it was collected."""
        function = getattr(item, "function", None)
        if isinstance(item, pytest.Function) and function is not None:
            self._tests.add(item.cls, getattr(item, "originalname", None) or item.name, function)
            self._called[id(item)] = (item, getattr(plain_function(item.obj), "__code__", None))

    def is_loaded_by(self, item: Any) -> str:
        """The name of a test module that an import hook of the project finds; checked once for each module."""
        module = getattr(item, "module", None)
        name = getattr(module, "__name__", None)
        if name is None or name in self._checked_modules:
            return ""
        self._checked_modules.add(name)
        for finder in list(sys.meta_path):
            file = _origin(finder if isinstance(finder, type) else type(finder))
            theirs = file.startswith(_WORKDIR) and not is_installed(file) and not may_change(file)
            if theirs and finder.find_spec(name, None) is not None:
                return "the way to import " + name
        return ""

    def compare(self, session: Any, items: Any) -> Any:
        """What differs from the sample's files, and the tests that cannot be compared with them."""
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
            self._collected[id(item)] = (item, item.nodeid, _parameters(item))
            why = "it is not a Python function"
            if isinstance(item, pytest.Function):
                name = getattr(item, "originalname", None) or item.name.partition("[")[0]
                other, why = self._comparison.register_test(
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

    def steering_file(self, file: str) -> str:
        return self._comparison.steering_file(file)

    def misfit(self, item: Any) -> str:
        """Why a test is not the one that was collected, or its file's names are others; empty when neither is so."""
        _, name, parameters = self._collected.get(id(item), (item, "", ()))
        if name != item.nodeid:
            return "it was not collected by this name"
        now = _parameters(item)
        if len(now) != len(parameters) or any(one is not other for one, other in zip(now, parameters)):  # noqa: B905
            return "its parameters were changed after it was collected"
        return self._comparison.misbound(getattr(item, "module", None), *modules_of(getattr(item, "cls", None)))

    def loop_changed(self) -> str:
        return next(filter(None, (self._all.foreign_function(*each) for each in LOOPS)), "")

    def test_differs(self, item: Any) -> str:
        instance = getattr(item, "_instance", None) or getattr(item, "instance", None)
        return self._comparison.changed(item) or self._comparison.strange_method(instance)

    def step_changed(self, item: Any) -> str:
        changed = self._steps.changed() or self._instance_changed(item)
        return changed or self.test_differs(item) or self._hook_changed(item.config.pluginmanager)

    def changed_before(self, item: Any) -> str:
        """Before a test, also check the bindings of its file; during a test it may patch them itself."""
        name = getattr(item, "originalname", None) or item.name.partition("[")[0]
        kind, module = getattr(item, "cls", None), getattr(item, "module", None)
        return self.step_changed(item) or self._comparison.binding_changed_for(kind, module, name)

    def anything_changed(self, session: Any) -> str:
        manager = session.config.pluginmanager
        changed = self._forged_by and "the file that code made by " + min(self._forged_by) + " is from"
        changed = (
            changed
            or self._all.changed()
            or self._steps.changed()
            or self._hook_changed(manager)
            or self._test_changed()
        )
        changed = changed or self._comparison.anything_changed()
        return changed or next(filter(None, (self._all.foreign_function(*late) for late in LATE)), "")

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
        if code is None or now is None or getattr(plain_function(now), "__code__", None) is code or self._may_call(now):
            return ""
        return "the test " + str(item.nodeid)

    def _may_call(self, value: Any) -> bool:
        """Whether this callable may be called in place of a test: plugins wrap tests."""
        value = getattr(value, "func", value)
        return self._all.is_allowed(value) or (plain_function(value) is None and is_installed(_origin(type(value))))

    def pytest_decides(self, config: Any) -> bool:
        """Whether pytest alone decides the outcome of a test, without hooks of trusted plugins."""
        names = [name for name in _DECIDING if name != "pytest_runtest_setup"]
        hooks = [each for name in names for each in getattr(config.hook, name).get_hookimpls()]
        return not any(
            self._is_trusted(plugin) for plugin in [each.plugin for each in hooks] if not _is_from_xdist(plugin)
        )

    def _is_trusted(self, plugin: Any) -> bool:
        file = _origin(plugin)
        if file.startswith((_PYTEST, HERE)):
            return False
        return id(plugin) in self._first or is_installed(file) or may_change(file) or _is_requested(plugin)

    def is_excluded(self, plugin: Any) -> bool:
        """Whether a plugin is excluded from canaries: those of the sample and installed ones are."""
        return self._is_trusted(plugin) or _origin(plugin).startswith(HERE)

    def _hook_changed(self, manager: Any) -> str:
        for name in _DECIDING:
            for each in getattr(manager.hook, name).get_hookimpls():
                known = self._known.get(id(each))
                if known is None:
                    if not self._may_come_late(each):
                        return name + ", by a plugin that was registered while the tests were collected or run"
                    self._know(each)
                elif (
                    each.function is not known[1] or getattr(plain_function(known[1]), "__code__", None) is not known[2]
                ):
                    return name
        return ""

    def _may_come_late(self, hook: Any) -> bool:
        if id(hook.plugin) in self._plugins:
            return True
        file = os.path.abspath(getattr(getattr(plain_function(hook.function), "__code__", None), "co_filename", "?"))
        return is_installed(file) or file.startswith((_PYTEST, HERE)) or may_change(file) or _is_requested(hook.plugin)


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


def _parameters(item: Any) -> Any:
    return list(getattr(getattr(item, "callspec", None), "params", {}).values())


def _is_requested(plugin: Any) -> bool:
    """Whether a test module or conftest names the plugin in its `pytest_plugins`."""
    name = getattr(plugin, "__name__", None)
    for module in list(sys.modules.values()):
        requested = getattr(module, "__dict__", {}).get("pytest_plugins")
        requested = [requested] if isinstance(requested, str) else requested
        if isinstance(requested, (list, tuple, set)) and name in requested and may_change(_origin(module)):
            return True
    return False


def _runners() -> Any:
    ours = ("unittest.case", "unittest.result", "unittest.suite")
    return [name for name in sorted(sys.modules) if name.startswith("pluggy.") or name in ours]


class _Recorder:
    def __init__(self, send: Any, watch: Any) -> None:
        self._send, self._watch = send, watch
        self._items = []  # type: list[Any]
        self._canaries_before = set()  # type: set[int]
        self._raised = set()  # type: set[int]
        self._failed = {}  # type: dict[str, Any]
        self._has_reported = False
        self._is_compared = False

    def pytest_plugin_registered(self, plugin: Any) -> None:
        """A `conftest.py` that was written after the start of this run is not from the sample."""
        file = _origin(plugin)
        if os.path.basename(file) != "conftest.py":
            return
        self._report_steering(file)
        if file.startswith(_WORKDIR) and os.path.exists(file) and os.stat(file).st_ctime > _BEGUN:
            self._report_change(file + ", written while the tests ran,")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: Any) -> None:
        self._send(event="begun")
        settings = getattr(session.config, "inipath", None) or getattr(session.config, "inifile", None)
        started_with = [sys.modules.get(name) for name in ("sitecustomize", "usercustomize")]
        for file in (settings, *(getattr(module, "__file__", None) for module in started_with)):
            self._report_steering(os.path.abspath(str(file)) if file else "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: Any) -> None:
        self._watch.begin(session.config.pluginmanager)

    @pytest.hookimpl(tryfirst=True)
    def pytest_itemcollected(self, item: Any) -> None:
        self._watch.found(item)
        self._check(self._watch.is_loaded_by, item)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: Any) -> None:
        """Run the canaries before the first test, before two random ones, and after the last."""
        self._items = list(session.items)
        between = SystemRandom().sample(self._items, min(2, len(self._items)))
        self._canaries_before = {id(item) for item in [*self._items[:1], *between]}
        self._check(self._compare, session)

    def _compare(self, session: Any) -> str:
        try:
            changed, missed = self._watch.compare(session, self._items)
        except Exception as problem:  # noqa: BLE001 -- a failed comparison does not end the run
            changed, missed = "", [("", type(problem).__name__ + ": " + str(problem))]
        for name, why in missed:
            self._send(event="uncompared", id=name, why=why)
        self._is_compared = True
        return str(changed)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        if id(item) in self._canaries_before:
            self._run_canaries(item.session)
        else:
            self._check(self._watch.changed_before, item)
        if self._is_compared:
            self._check(self._find_misfit, item)
        yield

    def _find_misfit(self, item: Any) -> str:
        why = self._watch.misfit(item)
        if why:
            self._send(event="uncompared", id=item.nodeid, why=why)
        return ""

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
        outcome = yield
        if outcome.excinfo is not None:
            self._raised.add(id(pyfuncitem))

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        if call.when == "call":
            self._check(self._watch.step_changed, item)
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
                self._report_change("what came of " + str(item.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        config = self._failed.pop(report.nodeid, None) if report.when == "call" else None
        if config is not None and report.outcome == "passed" and self._watch.pytest_decides(config):
            self._report_change("what came of " + str(report.nodeid))
        self._send(event="test", id=report.nodeid, when=report.when, outcome=report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._send(event="test", id=report.nodeid, when="collect", outcome="failed")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self) -> None:
        enable_in_workers()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Pass on what the recorder in a worker of pytest-xdist has found."""
        for what in (getattr(node, "workeroutput", None) or {}).get("carrel", ()):
            self._send(**what)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        yield
        self._end(session)
        self._send(event="finished", status=int(exitstatus))

    def _end(self, session: Any) -> None:
        self._run_canaries(session)
        replaced = self._watch.loop_changed()
        if replaced:
            self._send(event="uncompared", id="", why=replaced + " was replaced")
        for file in sorted(self._watch.traced_by):
            self._send(event="tracer", file=file)
        if self._items and not self._is_compared:
            self._send(event="uncompared", id="", why="they could not be compared in memory")

    def _run_canaries(self, session: Any) -> None:
        self._check(self._watch.anything_changed, session)
        try:
            lie = self._find_lie(session)
        except Exception as problem:  # noqa: BLE001 -- any problem is sent to the host
            self._send(event="canary", problem=f"{type(problem).__name__}: {problem}")
        else:
            self._send(event="canary", failed=not lie, lie=lie)

    def _find_lie(self, session: Any) -> str:
        plugins = session.config.pluginmanager.get_plugins()
        try:
            return find_lie(session, self._items, [each for each in plugins if self._watch.is_excluded(each)])
        except Exception:  # noqa: BLE001 -- a hook of the project may need attributes that a canary lacks
            others = [each for each in plugins if not _origin(each).startswith(_PYTEST)]
            return find_lie(session, self._items, others)

    def _check(self, find: Any, where: Any) -> None:
        """Run one check; a check that fails is sent to the host as such, and does not end the run."""
        try:
            self._report_change(find(where))
        except Exception as problem:  # noqa: BLE001 -- it is sent to the host
            self._send(event="unseen", problem=f"{type(problem).__name__}: {problem}")

    def _report_steering(self, file: str) -> None:
        """Send the name of a file that steers pytest; the host knows whether it was there before the command."""
        name = self._watch.steering_file(file)
        if name:
            self._send(event="steering", file=name)

    def _report_change(self, what: str) -> None:
        if what and not self._has_reported:
            self._has_reported = True
            self._send(event="changed", what=what)


class _WorkerRecorder(_Recorder):
    """The recorder in a worker of pytest-xdist: its findings go to the controller with the worker's output."""

    def __init__(self, watch: Any) -> None:
        self._found = []  # type: list[Any]
        super().__init__(self._collect, watch)

    def _collect(self, **what: Any) -> None:
        if what["event"] in ("changed", "canary", "uncompared", "tracer", "steering"):
            self._found.append(what)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        yield
        self._end(session)
        session.config.workeroutput["carrel"] = self._found


_send = open_channel()
if _send is not None or is_xdist_worker():
    _watch = _Watch()

    def pytest_configure(config: Any, _send: Any = _send, _watch: Any = _watch) -> None:
        recorder = _Recorder(_send, _watch) if _send is not None else _WorkerRecorder(_watch)
        config.pluginmanager.register(recorder, "carrel-recorder-lines")

    def pytest_plugin_registered(manager: Any, _watch: Any = _watch) -> None:
        _watch.is_first(manager)

    del _watch
del _send
