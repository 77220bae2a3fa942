"""A pydantic-ai agent that works by writing Python: one tool, `run_code`, on a carrel session."""

from pydantic_ai import Agent, ModelRetry, RunContext
from pydantic_ai.models import Model

from carrel import Session


async def run_code(context: RunContext[Session], code: str) -> object:
    """Run Python. Variables stay from call to call, and the value of the last expression comes back.

    Args:
        code: The Python to run.
    """
    result = await context.deps.run(code)
    if result.error is not None:
        raise ModelRetry(result.error)
    return {"printed": result.stdout, "value": repr(result.value)}


def coder(model: Model | str) -> Agent[Session, str]:
    """An agent for any model; give it a session as its `deps`."""
    agent = Agent(model, deps_type=Session, tools=[run_code], retries=3)

    @agent.instructions
    async def at_hand(context: RunContext[Session]) -> str:
        return await context.deps.describe(str(context.prompt or ""))

    return agent
