"""Calls a program while fewer and fewer descriptors are left; prints how each call ended, and what was left over."""

import asyncio
import contextlib
import os
import resource

from carrel.errors import ToolCallError
from tests.library.tools.making import catalog


async def main() -> None:
    tools = catalog("name: cat\ncommand: cat\nstdin: text\n")
    assert await tools.call("cat", {"text": "warm"}) == "warm"
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
            ends.add(await tools.call("cat", {"text": "fine"}))
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
