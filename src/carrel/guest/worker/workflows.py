"""`workflows` in running code: a workflow's source comes from the host and runs here."""

from __future__ import annotations

import asyncio
import asyncio.events
import asyncio.tasks
import contextvars
import ctypes
import inspect
import io
import linecache
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine
from typing import Any

from .host_calls import HostCallClient, RecordCall, RemoteName, error_class

DEEPEST = 50
"""Depth of workflows that call each other; a deeper call is considered endless."""
_HOST_METHODS = ("list", "search", "get", "create", "delete", "history", "read")
_LONGEST = 2000

_open: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("carrel_workflows_open", default=())
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Workflows(RemoteName):
    """`workflows` and `skills`: their methods are calls of the host, every other name is a workflow."""

    __slots__ = ("_runner",)
    _runner: WorkflowRunner

    def __init__(self, host: HostCallClient, name: str, builtins: Any, globals_: dict[str, Any]) -> None:
        super().__init__(host, name)
        object.__setattr__(self, "_runner", WorkflowRunner(host, name, builtins, globals_))

    def __getattr__(self, name: str) -> Any:
        if name in _HOST_METHODS:
            return RecordCall(self._host, f"{self._name}.{name}")
        if name == "invoke":
            return _Invoke(self._runner)
        if name.startswith(("_", "_repr_", "_ipython_")):
            raise AttributeError(name)
        return Workflow(self._runner, name)

    def __dir__(self) -> list[str]:
        """Return the methods and the workflows, by their Python names."""
        try:
            kept = self._host.call(f"{self._name}.list", {"args": [], "kwargs": {}})
        except Exception:  # noqa: BLE001 - inspecting an object must not raise
            kept = []
        names = {each["name"].partition(".")[0].replace("-", "_") for each in kept}
        return sorted({*_HOST_METHODS, "invoke", *names})

    def __repr__(self) -> str:
        return f"<{self._name}: list(), search(query), get(name), create(name, source, description), NAME(…)>"


class Workflow:
    """One workflow; calling it runs it."""

    __slots__ = ("_runner", "_workflow")

    def __init__(self, runner: WorkflowRunner, name: str) -> None:
        self._runner = runner
        self._workflow = name

    def __getattr__(self, name: str) -> Workflow:
        if name.startswith("_"):
            raise AttributeError(name)
        return Workflow(self._runner, f"{self._workflow}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.call(self._workflow, args, kwargs)

    def call_sync(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.call(self._workflow, args, kwargs)

    def call_async(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return self._runner.call_async(self._workflow, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Workflow:
        return self

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # loaded when it is read
        """The text of `help(workflows.NAME)`."""
        return self._runner.help_text(self._workflow)

    def __repr__(self) -> str:
        return f"<workflow {self._workflow}>"


class _Invoke:
    """`workflows.invoke(name, **arguments)`."""

    def __init__(self, runner: WorkflowRunner) -> None:
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.call(*_split_name(args, kwargs))

    call_sync = __call__

    def call_async(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return self._runner.call_async(*_split_name(args, kwargs))


def _split_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Split off the name of the workflow: the first argument, or `name`. A workflow may have a parameter `name` too."""
    if not args:
        if "name" not in kwargs:
            raise TypeError("workflows.invoke(name, …) needs the name of a workflow")
        kwargs = dict(kwargs)
        return str(kwargs.pop("name")), (), kwargs
    return str(args[0]), args[1:], kwargs


class WorkflowRunner:
    """Runs workflows; keeps what it has compiled."""

    def __init__(self, host: HostCallClient, name: str, builtins: Any, globals_: dict[str, Any]) -> None:
        self._host = host
        self._name = name
        self._builtins = builtins
        self._globals = globals_
        self._compiled: dict[str, tuple[str, types.CodeType, list[str]]] = {}

    def help_text(self, name: str) -> str:
        """Return signature, description and parameters of a workflow."""
        try:
            known = self._host.call(f"{self._name}.get", {"args": [name], "kwargs": {}})
        except Exception:  # noqa: BLE001 - inspecting an object must not raise
            known = None
        if not isinstance(known, dict):
            return f"{self._name}.{name}: there is no such workflow"
        given = ", ".join(str(each["name"]) for each in known["parameters"])
        lines = [f"{self._name}.{name}({given})", str(known["description"])]
        lines += [f"  {each['name']}: {each['description']}" for each in known["parameters"] if each["description"]]
        return "\n".join(line for line in lines if line.strip())

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a workflow and wait for its result, also if it is `async def` and a loop is running."""
        token = _enter(name)
        try:
            code = self._code(self._host.call(f"{self._name}.begin", self._begin_arguments(name)))
            started = time.monotonic()
            try:
                run = self._load(name, code)
                _check_arguments(name, run, args, kwargs)
                value = run(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = _run_blocking(value)
            except Exception as error:
                self._host.call(f"{self._name}.ended", _end_arguments(name, started, error))
                raise
            self._host.call(f"{self._name}.ended", _end_arguments(name, started))
            return value
        finally:
            _open.reset(token)

    async def call_async(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a workflow while other code runs: in the loop if it is `async def`, else in a thread."""
        token = _enter(name)
        try:
            code = self._code(await self._host.call_async(f"{self._name}.begin", self._begin_arguments(name)))
            started = time.monotonic()
            try:
                run = self._load(name, code)
                _check_arguments(name, run, args, kwargs)
                if inspect.iscoroutinefunction(run):
                    value = await run(*args, **kwargs)
                else:
                    value = await _run_in_thread(lambda: run(*args, **kwargs))
                    if inspect.isawaitable(value):
                        value = await value
            except Exception as error:
                await self._host.call_async(f"{self._name}.ended", _end_arguments(name, started, error))
                raise
            await self._host.call_async(f"{self._name}.ended", _end_arguments(name, started))
            return value
        finally:
            _open.reset(token)

    def _begin_arguments(self, name: str) -> dict[str, Any]:
        known = self._compiled.get(name)
        return {"args": [name], "kwargs": {"known": known[0]} if known is not None else {}}

    def _code(self, begun: dict[str, Any]) -> types.CodeType:
        name, digest, source = str(begun["name"]), str(begun["digest"]), begun.get("source")
        filename = f"<workflow {name}>"
        if isinstance(source, str):
            code = compile(source, filename, "exec", dont_inherit=True)
            self._compiled[name] = digest, code, io.StringIO(f"{source}\n", newline=None).readlines()
        _, code, lines = self._compiled[name]
        # For tracebacks; each time, because code may have cleared the cache.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
        return code

    def _load(self, name: str, code: types.CodeType) -> Callable[..., Any]:
        """Return its `run`, with new globals for each call."""
        module = types.ModuleType(f"workflow_{name.replace('.', '_')}")
        # Dataclasses and type hints look for the module of a class there.
        sys.modules[module.__name__] = module
        names = module.__dict__
        names["__builtins__"] = self._builtins
        names.update(self._globals)
        exec(code, names)
        run: Callable[..., Any] | None = names.get("run")
        if not callable(run):
            raise error_class("WorkflowExecutionError", ["RuntimeError"])(f"the workflow {name} has no function 'run'")
        return run


def _enter(name: str) -> contextvars.Token[tuple[str, ...]]:
    calls = (*_open.get(), name)
    if len(calls) > DEEPEST:
        raise error_class("WorkflowRecursionError", ["WorkflowExecutionError", "RecursionError"])(
            f"workflows call each other endlessly: {' → '.join(calls[-6:])}, {DEEPEST} deep;"
            " add a condition that ends it, or use a function within one workflow"
        )
    return _open.set(calls)


def _check_arguments(name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a `TypeError` with the workflow's name and signature; Python's own would name `run()`."""
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"workflows.{name}{signature}: {error}") from None


def _end_arguments(name: str, started: float, error: Exception | None = None) -> dict[str, Any]:
    details: dict[str, Any] = {"seconds": time.monotonic() - started}
    if error is not None:
        try:
            details["error"] = f"{type(error).__name__}: {error}"[:_LONGEST]
        except Exception:  # noqa: BLE001 - the exception's own __str__ may raise anything
            details["error"] = type(error).__name__
    return {"args": [name], "kwargs": details}


def _run_blocking(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine without awaiting it: run it in a new loop, while the current one waits."""
    if threading.current_thread() is not threading.main_thread():
        coroutine = _with_ticks(coroutine)
    outer = asyncio.events._get_running_loop()
    if outer is None:
        return asyncio.run(coroutine)
    task: Any = asyncio.current_task(outer)
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio.events._set_running_loop(None)
    try:
        return asyncio.run(coroutine)
    finally:
        asyncio.events._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)
        asyncio.set_event_loop(outer)


async def _with_ticks(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Keep a loop running bytecode: in a thread, an interrupt arrives only between two bytecodes."""

    async def tick() -> None:
        while True:  # noqa: ASYNC110 - the loop itself has to run, so an event would not do
            await asyncio.sleep(0.02)

    ticks = asyncio.ensure_future(tick())
    try:
        return await coroutine
    finally:
        ticks.cancel()


async def _run_in_thread(function: Callable[[], Any]) -> Any:
    """Run a plain function in a thread and return its result. The thread ends with the function, because a session
    with threads cannot be forked."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function)
        except BaseException as raised:  # noqa: BLE001 - raised again in the task that awaits it
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    thread = threading.Thread(target=work, name="carrel-workflow", daemon=True)
    thread.start()
    try:
        value, error = await future
        thread.join()
    except asyncio.CancelledError:
        if thread.ident is not None:
            _raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
        raise
    if error is not None:
        raise error
    return value
