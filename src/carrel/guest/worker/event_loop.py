"""The event loop of cells that await: kept between cells, stopped by an interrupt, renewed in a fork."""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Coroutine
from typing import Any

from .interrupts import Interrupts

_ASYNCIO = os.path.dirname(asyncio.__file__) + os.sep
_LOOP_FILES = (_ASYNCIO, selectors.__file__)


class CellLoop:
    """One loop for all cells of a session, so that tasks and connections of one cell continue in the next."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns or raises; KeyboardInterrupt when it was interrupted."""
        if self._loop is None or self._loop.is_closed() or not self._is_intact():
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        stopped = False

        def stop(filename: str) -> bool:
            nonlocal stopped
            # Where the loop only waits, cancelling is gentle; code that runs is stopped like any other.
            if stopped or not filename.startswith(_LOOP_FILES):
                return False
            stopped = True
            loop.call_soon_threadsafe(task.cancel)
            return True

        self._interrupts.stop = stop
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError as cancelled:
            if not stopped:
                raise
            where: BaseException = cancelled
            # Until Python 3.10 the traceback is in the exception that was raised before.
            while isinstance(where.__context__, asyncio.CancelledError):
                where = where.__context__
            raise KeyboardInterrupt().with_traceback(where.__traceback__) from None
        finally:
            self._interrupts.stop = None
            try:
                if not task.done():
                    self._clean_up(loop, task)
            finally:
                if task.done() and not task.cancelled():
                    # Retrieved, or asyncio logs it in a later cell, from a destructor, where interrupts are lost.
                    task.exception()

    def _clean_up(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        """An exception went through the loop and left the task unfinished: let the task clean up."""
        cleaning_up = True

        def stop(*_: object) -> None:
            if cleaning_up:
                loop.stop()

        try:
            task.cancel()
            task.add_done_callback(stop)
            loop.call_later(0.5, stop)
            loop.run_forever()
        except RuntimeError:
            self._loop = None
        except KeyboardInterrupt:
            # The same interrupt, raised from the task once more.
            if not task.done():
                raise
        finally:
            cleaning_up = False

    def forget(self) -> None:
        """After a reset: the next cell that awaits gets a new loop."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    def descriptors(self) -> set[int]:
        """The descriptors of the loop itself."""
        loop: Any = self._loop
        if loop is None or loop.is_closed() or not isinstance(loop, asyncio.SelectorEventLoop):
            return set()
        return {loop._selector.fileno(), loop._ssock.fileno(), loop._csock.fileno()}  # type: ignore[attr-defined]

    def _is_intact(self) -> bool:
        """Whether code has not closed the loop's descriptors."""
        try:
            for fd in self.descriptors():
                os.fstat(fd)
        except OSError:
            return False
        return True

    def renew(self) -> None:
        """In a fork: replace the selector, whose kernel object is shared with the parent and would mix their events."""
        loop: Any = self._loop
        if loop is None or loop.is_closed():
            return
        if not isinstance(loop, asyncio.SelectorEventLoop):
            self._loop = None
            return
        inner: Any = loop
        before = inner._selector
        inner._selector = selectors.DefaultSelector()
        for key in list(before.get_map().values()):
            try:
                inner._selector.register(key.fileobj, key.events, key.data)
            except (OSError, ValueError):
                continue  # closed in this process: the old channel
        before.close()
        inner._close_self_pipe()
        inner._make_self_pipe()
