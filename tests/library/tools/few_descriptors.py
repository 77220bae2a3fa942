"""Calls a program while fewer and fewer descriptors are left; prints how each call ended, and what was left over."""

import asyncio
import contextlib
import os
import resource

from carrel.errors import ToolCallError, ToolTimeoutError
from tests.support.tools import catalog


async def main() -> None:
    tools = catalog("name: wait\ncommand: sleep 60\nstdin: text\ntimeout: 0.02\n")
    with contextlib.suppress(ToolTimeoutError):
        await tools.call("wait", {"text": "warm"})
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    ends = set()
    for left in range(16):
        taken: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for fd in taken[:left]:
            os.close(fd)
        try:
            await tools.call("wait", {"text": "on"})
        except ToolTimeoutError:
            ends.add("it ran")
        except ToolCallError as problem:
            ends.add(str(problem).rpartition(": ")[2])
        finally:
            for fd in taken[left:]:
                os.close(fd)
    print(sorted(ends))


asyncio.run(main())
try:
    print("left over:", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("nothing left over")
