"""The agent of agent_loop.py with a real model, by Anthropic's SDK. `ANTHROPIC_API_KEY=… python anthropic_agent.py`"""

import asyncio
import functools
import sys

import anthropic
from agent_loop import agent  # type: ignore[import-not-found]

import carrel

MODEL = "claude-sonnet-4-5"


async def main(task: str) -> None:
    client = anthropic.AsyncAnthropic()
    model = functools.partial(client.messages.create, model=MODEL, max_tokens=4096)
    async with carrel.Session.from_base("./.carrel") as session:
        print(await agent(session, model, task))


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "How many prime numbers are below 1000?"))
