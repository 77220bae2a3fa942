"""Runs the coroutines of synchronous sessions on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 -- it registers what it does at exit, which must come after ours
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Self, TypeVar

from carrel.errors import SessionClosed, SessionNotFound
from carrel.session.session import Session

if TYPE_CHECKING:
    from carrel.conversation.models.conversation import Conversation
    from carrel.session.storage import StorageBackend

P = ParamSpec("P")
T = TypeVar("T")

_EXIT_TIMEOUT = 10.0
"""Seconds that open sessions have to close when the interpreter ends."""


class BackgroundLoop:
    """An event loop in a daemon thread, shared by all synchronous sessions of the process.

    One loop for all of them, because sessions may share a storage, whose locks and connections belong to one loop."""

    _shared: ClassVar[BackgroundLoop | None] = None
    _creating: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="carrel-loop", daemon=True)
        self._open: set[Session] = set()
        self._thread.start()

    @classmethod
    def shared(cls) -> BackgroundLoop:
        """Return the loop of this process, started at the first call."""
        with cls._creating:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    @classmethod
    def _after_fork(cls) -> None:
        """Forget the loop in a forked child, where its thread does not exist."""
        cls._shared = None
        cls._creating = threading.Lock()

    def _serve(self) -> None:
        while not self._loop.is_closed():
            # asyncio raises these two out of the loop when a task ends with one, as a tool that calls sys.exit.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
                self._loop.close()

    def wait(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> T:
        """Return the result of a coroutine that runs on the loop.

        An exception in the waiting thread, as KeyboardInterrupt by Ctrl-C, cancels the coroutine first: running code
        is interrupted. A second one does not wait for the end of that."""
        try:
            self._refuse_unusable()
        except BaseException:
            work.close()
            raise
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work, context=context))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(begin)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a plain function that is called on the loop."""

        async def call() -> T:
            return function(*args, **kwargs)

        return self.wait(call())

    def iterate(self, pieces: AsyncGenerator[T]) -> Generator[T]:
        """Yield what an asynchronous generator yields; closing the iterator closes it."""
        context = copy_context()  # One for all steps: the generator may reset context variables that it has set.
        try:
            while True:
                try:
                    piece = self.wait(_next(pieces), context)
                except StopAsyncIteration:
                    return
                yield piece
        finally:
            if self._is_current():  # The iterator is collected as garbage on the loop itself.
                self._loop.create_task(_close(pieces), context=context)
            else:
                self.wait(_close(pieces), context)

    def _is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _refuse_unusable(self) -> None:
        if os.getpid() != self._pid:
            raise SessionClosed(
                f"this session was opened by process {self._pid}, of which this one is a fork; open another one here"
            )
        if self._is_current():
            raise RuntimeError(
                "a synchronous session was called from its own event loop, which would wait for itself; "
                "call it from another thread (`on_output` functions must not call the session)"
            )
        if self._loop.is_closed() or not self._thread.is_alive():
            raise SessionClosed("the interpreter is ending; no session can be used any more")

    def add(self, session: Session) -> None:
        """Close the session at the end of the interpreter, unless `discard` is called before."""
        self._open.add(session)

    def discard(self, session: Session) -> None:
        self._open.discard(session)

    def close_later(self, session: Session) -> None:
        """Close a session that is not used any more, without waiting for it; callable from any thread."""
        if os.getpid() != self._pid or session not in self._open or self._loop.is_closed():
            return

        async def close() -> None:
            try:
                await session.close()
            finally:
                self._open.discard(session)

        with suppress(RuntimeError):  # The loop was closed in between, at the end of the interpreter.
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(close()))

    def close(self) -> None:
        """Close all open sessions and end the thread."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return

        async def close_all() -> None:
            async with asyncio.timeout(_EXIT_TIMEOUT):
                await asyncio.gather(*(session.close() for session in self._open), return_exceptions=True)

        with suppress(TimeoutError):
            self.wait(close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_EXIT_TIMEOUT)


async def _next(pieces: AsyncGenerator[T]) -> T:
    return await anext(pieces)


async def _close(pieces: AsyncGenerator[Any]) -> None:
    await pieces.aclose()


async def _result_of(work: Awaitable[T]) -> T:
    return await work


def _close_shared() -> None:
    if BackgroundLoop._shared is not None:
        BackgroundLoop._shared.close()


os.register_at_fork(after_in_child=BackgroundLoop._after_fork)
# `atexit` would be too late: by then no thread can be started any more, and closing a session writes files in threads.
threading._register_atexit(_close_shared)  # type: ignore[attr-defined]


class SyncSessionBase:
    """What `SyncSession` consists of besides the methods that are generated from `Session`."""

    _wrappers: ClassVar[weakref.WeakValueDictionary[str, SyncSessionBase]] = weakref.WeakValueDictionary()
    """The synchronous sessions of this process that are in use, by id."""

    _session: Session
    _loop: BackgroundLoop

    @classmethod
    def _around(cls, session: Session) -> Self:
        """Return the synchronous counterpart of a new session."""
        wrapper = cls.__new__(cls)
        wrapper._wrap(session)
        return wrapper

    def _wrap(self, session: Session) -> None:
        self._session = session
        self._loop = BackgroundLoop.shared()
        self._loop.add(session)
        self._wrappers[session.id] = self
        weakref.finalize(self, self._loop.close_later, session).atexit = False

    @classmethod
    def _attached(cls, session: Session) -> Self:
        """Return the synchronous session that stands for an open session."""
        wrapper = cls._wrappers.get(session.id)
        if wrapper is None or wrapper._session is not session or not isinstance(wrapper, cls):
            raise SessionNotFound(
                f"the session {session.id!r} is open in this process, but not as a {cls.__name__}; use Session.attach "
                "in the event loop that opened it"
            )
        return wrapper

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def storage(self) -> StorageBackend:
        return self._session.storage

    @property
    def conversation(self) -> Conversation | None:
        """The typed conversation, if the session holds one; see `converse` and `wait`."""
        return self._session.conversation

    def wait(self, work: Awaitable[T]) -> T:
        """Wait for something asynchronous that belongs to the session, such as `conversation.update_title("…")`."""
        return self._loop.wait(_result_of(work))

    def __repr__(self) -> str:
        return f"<Sync{repr(self._session)[1:]}"

    def _repr_html_(self) -> str:
        return self._session._repr_html_()
