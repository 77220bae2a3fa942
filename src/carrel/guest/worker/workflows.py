"""Workflows called where the code runs: their source comes from the host, and they are run here, beside the code."""

from __future__ import annotations

import asyncio
import asyncio.events
import asyncio.tasks
import contextvars
import ctypes
import inspect
import linecache
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine
from typing import Any

from .host_calls import HostCallClient, RecordCall, RemoteName
from .host_errors import error_class
from .tracebacks import source_lines

DEEPEST = 50
"""How far workflows may call each other: more is taken for a circle."""
_ASKED_OF_THE_HOST = ("list", "search", "get", "create", "delete", "history", "read")
_LONGEST = 2000

_open: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("carrel_workflows_open", default=())
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Workflows(RemoteName):
    """`workflows`, and `skills`: what it can do itself is asked of the host, every other name is a workflow."""

    __slots__ = ("_here",)
    _here: Here

    def __init__(self, host: HostCallClient, name: str, builtins: Any, given: dict[str, Any]) -> None:
        super().__init__(host, name)
        object.__setattr__(self, "_here", Here(host, name, builtins, given))

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED_OF_THE_HOST:
            return RecordCall(self._host, f"{self._name}.{name}")
        if name == "invoke":
            return _Invoke(self._here)
        if name.startswith(("_", "_repr_", "_ipython_")):
            raise AttributeError(name)
        return Workflow(self._here, name)

    def __dir__(self) -> list[str]:
        """What `dir(workflows)` shows; the names as code writes them."""
        try:
            kept = self._host.call(f"{self._name}.list", {"args": [], "kwargs": {}})
        except Exception:  # noqa: BLE001 - looking at an object raises nothing, whatever the host says
            kept = []
        names = {each["name"].partition(".")[0].replace("-", "_") for each in kept}
        return sorted({*_ASKED_OF_THE_HOST, "invoke", *names})

    def __repr__(self) -> str:
        return f"<{self._name}: list(), search(query), get(name), create(name, source, description), NAME(…)>"


class Workflow:
    """One workflow; calling it runs it."""

    __slots__ = ("_here", "_workflow")

    def __init__(self, here: Here, name: str) -> None:
        self._here = here
        self._workflow = name

    def __getattr__(self, name: str) -> Workflow:
        if name.startswith("_"):
            raise AttributeError(name)
        return Workflow(self._here, f"{self._workflow}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._here.call(self._workflow, args, kwargs)

    def call_sync(self, *args: Any, **kwargs: Any) -> Any:
        return self._here.call(self._workflow, args, kwargs)

    def call_async(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return self._here.call_async(self._workflow, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Workflow:
        return self

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # asked for when somebody looks, and not before
        """What `help(workflows.NAME)` shows."""
        return self._here.told(self._workflow)

    def __repr__(self) -> str:
        return f"<workflow {self._workflow}>"


class _Invoke:
    """`workflows.invoke(name, **arguments)`."""

    def __init__(self, here: Here) -> None:
        self._here = here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._here.call(*_named(args, kwargs))

    call_sync = __call__

    def call_async(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return self._here.call_async(*_named(args, kwargs))


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The workflow's name is the first argument; one of its own parameters may be called `name` too."""
    if not args:
        if "name" not in kwargs:
            raise TypeError("workflows.invoke(name, …) needs the name of a workflow")
        kwargs = dict(kwargs)
        return str(kwargs.pop("name")), (), kwargs
    return str(args[0]), args[1:], kwargs


class Here:
    """Where workflows are run: what they find as globals, and what was compiled of them."""

    def __init__(self, host: HostCallClient, name: str, builtins: Any, given: dict[str, Any]) -> None:
        self._host = host
        self._name = name
        self._builtins = builtins
        self._given = given
        self._compiled: dict[str, tuple[str, types.CodeType, list[str]]] = {}

    def told(self, name: str) -> str:
        """What is known of a workflow, for a person."""
        try:
            known = self._host.call(f"{self._name}.get", {"args": [name], "kwargs": {}})
        except Exception:  # noqa: BLE001 - looking at an object raises nothing, whatever the host says
            known = None
        if not isinstance(known, dict):
            return f"{self._name}.{name}: there is no such workflow"
        given = ", ".join(str(each["name"]) for each in known["parameters"])
        lines = [f"{self._name}.{name}({given})", str(known["description"])]
        lines += [f"  {each['name']}: {each['description']}" for each in known["parameters"] if each["description"]]
        return "\n".join(line for line in lines if line.strip())

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it and wait for what it returns, also when it is `async def` and when a loop is running."""
        token = _enter(name)
        try:
            code = self._code(self._host.call(f"{self._name}.begin", self._question(name)))
            began = time.monotonic()
            try:
                run = self._loaded(name, code)
                _fitting(name, run, args, kwargs)
                value = run(*args, **kwargs)
                if inspect.iscoroutine(value):
                    value = _waited(value)
            except Exception as problem:
                self._host.call(f"{self._name}.ended", _how(name, began, problem))
                raise
            self._host.call(f"{self._name}.ended", _how(name, began))
            return value
        finally:
            _open.reset(token)

    async def call_async(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it while others go on: in the loop when it is `async def`, else in a thread of its own."""
        token = _enter(name)
        try:
            code = self._code(await self._host.call_async(f"{self._name}.begin", self._question(name)))
            began = time.monotonic()
            try:
                run = self._loaded(name, code)
                _fitting(name, run, args, kwargs)
                if inspect.iscoroutinefunction(run):
                    value = await run(*args, **kwargs)
                else:
                    value = await _in_a_thread(lambda: run(*args, **kwargs))
                    if inspect.isawaitable(value):
                        value = await value
            except Exception as problem:
                await self._host.call_async(f"{self._name}.ended", _how(name, began, problem))
                raise
            await self._host.call_async(f"{self._name}.ended", _how(name, began))
            return value
        finally:
            _open.reset(token)

    def _question(self, name: str) -> dict[str, Any]:
        known = self._compiled.get(name)
        return {"args": [name], "kwargs": {"known": known[0]} if known is not None else {}}

    def _code(self, begun: dict[str, Any]) -> types.CodeType:
        name, digest, source = str(begun["name"]), str(begun["digest"]), begun.get("source")
        filename = f"<workflow {name}>"
        if isinstance(source, str):
            code = compile(source, filename, "exec", dont_inherit=True)
            self._compiled[name] = digest, code, source_lines(source)
        _, code, lines = self._compiled[name]
        # For tracebacks; said again each time, because code may have emptied the cache.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
        return code

    def _loaded(self, name: str, code: types.CodeType) -> Callable[..., Any]:
        """Its `run`, with globals of its own: what one call leaves in them, another does not find."""
        module = types.ModuleType(f"workflow_{name.replace('.', '_')}")
        # Dataclasses and type hints look for the module of a class there.
        sys.modules[module.__name__] = module
        names = module.__dict__
        names["__builtins__"] = self._builtins
        names.update(self._given)
        exec(code, names)
        run: Callable[..., Any] | None = names.get("run")
        if not callable(run):
            raise error_class("WorkflowExecutionError", ["RuntimeError"])(f"the workflow {name} has no function 'run'")
        return run


def _enter(name: str) -> contextvars.Token[tuple[str, ...]]:
    way = (*_open.get(), name)
    if len(way) > DEEPEST:
        raise error_class("WorkflowRecursionError", ["WorkflowExecutionError", "RecursionError"])(
            f"workflows call each other without end: {' → '.join(way[-6:])}, {DEEPEST} deep;"
            " give it an end, or make it a function inside of one workflow"
        )
    return _open.set(way)


def _fitting(name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`TypeError` in the workflow's own name, with what it takes, where Python would speak of a `run()`."""
    try:
        takes = inspect.signature(run)
    except (TypeError, ValueError):
        return
    try:
        takes.bind(*args, **kwargs)
    except TypeError as problem:
        raise TypeError(f"workflows.{name}{takes}: {problem}") from None


def _how(name: str, began: float, problem: Exception | None = None) -> dict[str, Any]:
    how: dict[str, Any] = {"seconds": time.monotonic() - began}
    if problem is not None:
        try:
            how["error"] = f"{type(problem).__name__}: {problem}"[:_LONGEST]
        except Exception:  # noqa: BLE001 - the exception's own __str__ may raise anything; its class is what is left
            how["error"] = type(problem).__name__
    return {"args": [name], "kwargs": how}


def _waited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns, from code that does not await: in a loop of its own, while another one waits."""
    if threading.current_thread() is not threading.main_thread():
        coroutine = _beating(coroutine)
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


async def _beating(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The same in a thread, where an interrupt only comes between two bytecodes: a loop that waits has to run some."""

    async def beat() -> None:
        while True:  # noqa: ASYNC110 - nobody could set an event: it is the loop itself that has to turn
            await asyncio.sleep(0.02)

    beats = asyncio.ensure_future(beat())
    try:
        return await coroutine
    finally:
        beats.cancel()


async def _in_a_thread(function: Callable[[], Any]) -> Any:
    """What a plain function returns, while the loop goes on. The thread ends with it, so that none is left to keep
    the session from being forked."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, problem: BaseException | None) -> None:
        if not future.done():
            future.set_result((value, problem))

    def work() -> None:
        value, problem = None, None
        try:
            value = context.run(function)
        except BaseException as raised:  # noqa: BLE001 - whatever it raises is for whoever awaits it
            problem = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, problem)

    thread = threading.Thread(target=work, name="carrel-workflow", daemon=True)
    thread.start()
    try:
        value, problem = await future
        thread.join()
    except asyncio.CancelledError:
        if thread.ident is not None:
            _raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
        raise
    if problem is not None:
        raise problem
    return value
