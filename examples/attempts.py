"""Several attempts at a task, each from the same checkpoint, until one passes. `python attempts.py`"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import carrel

Model = Callable[[list[dict[str, Any]]], Awaitable[str]]


async def solve(task: carrel.Session, model: Model, most: int = 5) -> int | None:
    """Return the number of the attempt that solved it, or None. The model answers with a shell command."""
    assert task.sample is not None
    conversation = await task.converse(task.sample.sample_id)
    conversation.create_user_message(task.sample.problem_statement)
    start = await task.checkpoint("start")
    for attempt in range(1, most + 1):
        command = await model(conversation.get_messages_for_llm("anthropic"))
        conversation.create_assistant_message().add_text(command)
        done = await task.execute_command(command)
        verdict = await task.verify()
        print(f"attempt {attempt}: exit code {done.exit_code}, {verdict.outcome}")
        if verdict.is_success:
            return attempt
        # Messages, variables and files are as they were at the checkpoint; the log keeps the attempt.
        await task.rewind(start)
    return None


def scripted(*commands: str) -> Model:
    """Return a replacement for a model that gives these answers."""
    turns = iter(commands)

    async def create(messages: list[dict[str, Any]]) -> str:
        return next(turns)

    return create


async def main() -> None:
    async with carrel.Session.for_sample("demo", "calc-1") as task:
        assert task.sample is not None
        right = f"git apply - <<'END'\n{task.sample.patch}\nEND"
        model = scripted("rm -rf *", "echo 'It looks right to me'", right)
        await solve(task, model)
        assert task.conversation is not None
        print(f"messages now: {len(task.conversation.messages)}")


if __name__ == "__main__":
    asyncio.run(main())
