"""A small agent: a model writes Python, a session runs it, the messages are stored. `python agent_loop.py`"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import carrel

RUN_CODE = {
    "name": "run_code",
    "description": "Run Python. Variables stay from call to call.",
    "input_schema": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}

Model = Callable[..., Awaitable[Any]]


async def agent(session: carrel.Session, model: Model, task: str) -> str:
    """Work on a task until the model has nothing more to run; returns its last answer."""
    store = session.storage.get_session_store()
    await store.append_message(session.id, carrel.user_text_message(task), provider="anthropic", model="scripted")
    system = f"Solve the task with run_code. {await session.describe(task)}"
    while True:
        messages = [message async for message in store.iter_messages(session.id)]
        answer = await model(tools=[RUN_CODE], **carrel.to_provider(messages, "anthropic", system=system).payload)
        [message] = carrel.from_provider(answer, "anthropic")
        await store.append_message(session.id, message)
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        if not calls:
            return carrel.flatten_message_text(message)
        results = [await run(session, call) for call in calls]
        await store.append_message(session.id, carrel.build_message("user", results))


async def run(session: carrel.Session, call: dict[str, Any]) -> dict[str, Any]:
    result = await session.run(call["input"]["code"])
    output = result.stdout + (result.error or repr(result.value))
    return carrel.tool_result_block(tool_use_id=call["id"], model_text=output, is_error=not result.is_ok)


def scripted(*codes: str, last: str) -> Model:
    """Return a replacement for `anthropic.AsyncAnthropic().messages.create` that gives these answers."""
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "run_code", "input": {"code": c}} for n, c in enumerate(codes)]
    turns = iter([*calls, {"type": "text", "text": last}])

    async def create(**request: Any) -> dict[str, Any]:
        return {"role": "assistant", "model": "scripted", "content": [next(turns)]}

    return create


async def main() -> None:
    model = scripted("words = 'the quick brown fox'.split()", "len(wrods)", "len(words)", last="There are four words.")
    async with carrel.Session.from_base("./.carrel") as session:
        print(await agent(session, model, "How many words are in 'the quick brown fox'?"))


if __name__ == "__main__":
    asyncio.run(main())
