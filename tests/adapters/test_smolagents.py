"""CarrelExecutor against smolagents' local executor: the same code must give the same results."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.adapters.frameworks import require

require("smolagents")

from smolagents import CodeAgent, LocalPythonExecutor, Tool, tool
from smolagents.default_tools import FinalAnswerTool
from smolagents.local_python_executor import CodeOutput, InterpreterError, PythonExecutor
from smolagents.models import ChatMessage, MessageRole, Model

from carrel import MemoryStorage, SyncSession
from carrel.adapters.smolagents import CarrelExecutor

pytestmark = pytest.mark.real


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool
def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: Why.
    """
    raise ValueError(reason)


@tool
def search(query: str) -> str:
    """Search; carrel's own `tools` have a method of this name.

    Args:
        query: For what.
    """
    return f"found {query}"


TOOLS: dict[str, Tool] = {"add": add, "fail": fail, "search": search, "final_answer": FinalAnswerTool()}
CODES: dict[str, list[str]] = {
    "a value": ["1 + 1"],
    "prints": ["print('one')\nprint('two')\n3"],
    "no value": ["print('one')"],
    "values of many types": ["[1, 2.5, 'x', None, True, (1, 2), {'a': [1]}, {1, 2}, 2**70]"],
    "variables stay": ["x = [1]\nx.append(2)\nx", "x + [3]"],
    "functions stay": ["def double(n):\n    return n * 2\ndouble(1)", "double(4)"],
    "an import stays": ["import math\nmath.floor(2.5)", "math.ceil(2.5)"],
    "a class": ["class Point:\n    def __init__(self, x):\n        self.x = x\nPoint(3).x"],
    "comprehensions": ["{k: v for k, v in zip('ab', range(2))}"],
    "a variable from outside": ["given['list'][0] + number"],
    "a tool": ["add(1, 2)"],
    "a tool by name": ["add(a=1, b=2)"],
    "a tool by both": ["add(1, b=2)"],
    "a tool named as a method of tools": ["search('x')"],
    "a tool in a loop": ["sum(add(n, 1) for n in range(5))"],
    "a tool that fails, caught": ["try:\n    fail('no')\nexcept Exception as problem:\n    print('caught')\n1"],
    "the final answer": ["final_answer(42)"],
    "the final answer ends the code": ["print('before')\nfinal_answer({'a': [1]})\nprint('after')"],
    "the final answer by name": ["final_answer(answer='x')"],
    "the final answer of a function": ["def end():\n    final_answer('deep')\nend()"],
    "no except stops the final answer": ["try:\n    final_answer(1)\nexcept Exception:\n    print('caught')"],
    "after the final answer": ["final_answer(1)", "2"],
    "an exception": ["1 / 0"],
    "after an exception": ["y = 1\n1 / 0", "y"],
    "an exception of the code": ["raise ValueError('mine')"],
    "a tool that fails": ["fail('no')"],
    "wrong syntax": ["1 +"],
    "too many arguments": ["add(1, 2, 3)"],
    "an unknown name": ["nothing_like_this"],
    "a long output": ["print('x' * 200_000)"],
}


def results(executor: PythonExecutor, codes: list[str]) -> list[Any]:
    """What each piece of code gives: output, logs and whether it is final, or the kind of the error."""
    executor.send_variables({"number": 3, "given": {"list": [1, 2]}})
    executor.send_tools(TOOLS)
    found: list[Any] = []
    for code in codes:
        try:
            output: CodeOutput = executor(code)
        except InterpreterError:
            found.append(InterpreterError)
        else:
            found.append((output.output, output.logs, output.is_final_answer))
    return found


@pytest.fixture(scope="module")
def session() -> Iterator[SyncSession]:
    with SyncSession(MemoryStorage()) as session:
        yield session


@pytest.mark.parametrize("name", CODES)
def test_code_gives_what_the_local_executor_gives(name: str, session: SyncSession) -> None:
    session.reset()
    assert results(CarrelExecutor(session), CODES[name]) == results(LocalPythonExecutor([]), CODES[name])


def test_every_method_of_the_base_class_is_used() -> None:
    own = {name for name, member in vars(PythonExecutor).items() if callable(member) and name != "__init__"}
    assert own - {"__class__"} == {"send_tools", "send_variables", "__call__"}, "results() calls these"


def test_the_error_names_what_happened_and_what_was_printed(session: SyncSession) -> None:
    with pytest.raises(InterpreterError, match=r"(?s)begun.*ZeroDivisionError"):
        CarrelExecutor(session)("print('begun')\n1 / 0")


def test_a_step_that_takes_too_long_keeps_the_variables(session: SyncSession) -> None:
    executor = CarrelExecutor(session, timeout=1)
    executor("kept = 5")
    with pytest.raises(InterpreterError, match="1"):
        executor("while True: pass")
    assert executor("kept").output == 5


class ScriptedModel(Model):
    def __init__(self, *codes: str) -> None:
        super().__init__()
        self.codes = list(codes)

    def generate(self, messages: Any, **settings: Any) -> ChatMessage:
        code = self.codes.pop(0)
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: go on.\n<code>\n{code}\n</code>")


def test_an_agent_with_tools_and_variables() -> None:
    model = ScriptedModel(
        "total = add(number, 2)\nopen('a.txt', 'w').write(str(total))", "1 / 0", "final_answer(total)"
    )
    with SyncSession(MemoryStorage()) as session:
        agent = CodeAgent(tools=[add], model=model, executor=CarrelExecutor(session), verbosity_level=0)
        assert agent.run("Add.", additional_args={"number": 3}) == 5
        assert "ZeroDivisionError" in str(agent.memory.steps[2].error)
        assert session.read_file("a.txt") == b"5"
        agent.cleanup()
        assert session.run("total").value == 5, "a session that is handed in stays open"
