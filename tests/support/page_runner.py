"""Run the examples of one page of documentation in order, in the current folder: `page_runner.py PAGE`.

Blocks marked `python` share one namespace and may use `await` outside of functions. In blocks marked `console`, each
line after a `$` is run by the shell. A `text` block right after a `python` block, and the lines under a command, are
what it prints; `…` stands for any text.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    kind: str
    body: str
    line: int
    """Where the body begins in the page, from 1."""
    prints: str | None
    """The output that the page shows, or None when it shows none."""


def blocks(page: str) -> Iterator[Block]:
    fences = list(FENCE.finditer(page))
    for fence, after in zip(fences, [*fences[1:], None], strict=True):
        follows = after is not None and after[1] == "text" and not page[fence.end() : after.start()].strip()
        yield Block(
            fence[1], fence[2], page.count("\n", 0, fence.start(2)) + 1, after[2] if after and follows else None
        )


def commands(block: Block) -> Iterator[Block]:
    """The commands of a console block, each with the output that the page shows."""
    for part in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.body, re.MULTILINE):
        line = block.line + block.body.count("\n", 0, part.start())
        yield Block("console", part[1], line, part[2] or None)


def matches(wanted: str, printed: str) -> bool:
    pattern = ".*?".join(map(re.escape, wanted.strip().split("…")))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def run_python(block: Block, path: Path, namespace: dict[str, object], runner: asyncio.Runner) -> str:
    # The padding makes tracebacks name the lines of the page.
    source = "\n" * (block.line - 1) + block.body
    code = compile(source, path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if code.co_flags & inspect.CO_COROUTINE:
            runner.run(eval(code, namespace))
        else:
            exec(code, namespace)
    return printed.getvalue()


def run_command(block: Block) -> str:
    done = subprocess.run(["/bin/sh", "-c", block.body], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SystemExit(f"line {block.line}: `{block.body}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_page(path: Path) -> int:
    """Run the page and return the number of blocks and commands; stop at the first whose output differs."""
    count = 0
    namespace: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks(path.read_text(encoding="utf-8")):
            for step in commands(block) if block.kind == "console" else [block] if block.kind == "python" else []:
                printed = run_command(step) if step.kind == "console" else run_python(step, path, namespace, runner)
                if step.prints is not None and not matches(step.prints, printed):
                    raise SystemExit(
                        f"line {step.line}: the page says it prints\n{step.prints}\nbut it prints\n{printed}"
                    )
                count += 1
    return count


if __name__ == "__main__":
    print(run_page(Path(sys.argv[1])))
