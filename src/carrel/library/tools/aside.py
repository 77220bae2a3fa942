"""A plain function in a thread of its own, awaited; one that never ends keeps neither the loop nor the program."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_a_thread(function: Callable[[], Result]) -> Result:
    """What the function returns or raises. Cancelling the caller lets the thread go on, for nobody."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, problem: BaseException | None) -> None:
        if answered.done():
            return
        if problem is None:
            answered.set_result(result)
        else:
            answered.set_exception(problem)

    def run() -> None:
        result: Any = None
        problem: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stopped:
            # A future refuses it, because through an await it would mean something else.
            problem = RuntimeError(f"the function raised {stopped!r}")
        except BaseException as raised:  # noqa: BLE001 -- whatever it raises is for whoever waits
            problem = raised
        try:
            loop.call_soon_threadsafe(settle, result, problem)
        except RuntimeError:
            return  # the loop is closed, so nobody waits

    # Not the loop's own pool: that has few threads, and one that hangs in it keeps the program from ending.
    threading.Thread(target=run, name="carrel-tool", daemon=True).start()
    return await answered
