"""CarrelSession against the SDK's own SQLite session: the same items and operations must give the same results."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.frameworks import first_line_before_kill, require

require("agents")

import agents
from agents import SQLiteSession
from agents.memory import Session as AgentsSession
from openai.types import responses

from carrel import FileStorage, MemoryStorage, Session, assistant_message, text_block
from carrel.adapters.openai_agents import CarrelSession

pytestmark = pytest.mark.real

CALL = {"type": "function_call", "id": "f-1", "call_id": "a", "name": "look", "arguments": '{ "x":1 }'}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "seen"}
USER = {"role": "user", "content": "Hello."}
ANSWER = {
    "type": "message",
    "id": "m-1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
}
REASONING = {"type": "reasoning", "id": "r-1", "summary": [], "encrypted_content": "xyz"}

SINGLE: dict[str, dict[str, Any]] = {
    "user text": USER,
    "user parts": {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "Look: ☃ \u0000 😀"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
            {"type": "input_file", "file_id": "file-1"},
        ],
    },
    "developer": {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    "system": {"role": "system", "content": "Be kind."},
    "empty text": {"role": "user", "content": ""},
    "no parts": {"role": "user", "content": []},
    "assistant text": {"role": "assistant", "content": "Done."},
    "assistant message": ANSWER,
    "refusal": {**ANSWER, "content": [{"type": "refusal", "refusal": "No."}]},
    "reasoning": REASONING,
    "reasoning with summary": {**REASONING, "summary": [{"type": "summary_text", "text": "Hm."}]},
    "call": CALL,
    "call that is not JSON": {**CALL, "arguments": "not JSON"},
    "result": RESULT,
    "result in parts": {**RESULT, "output": [{"type": "input_text", "text": "first"}]},
    "web search": {
        "type": "web_search_call",
        "id": "w-1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    "custom tool": {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+1"},
    "shell": {
        "type": "local_shell_call",
        "id": "s",
        "call_id": "s",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    "code interpreter": {
        "type": "code_interpreter_call",
        "id": "i",
        "container_id": "c",
        "code": "1",
        "outputs": [{"type": "logs", "logs": "1"}],
        "status": "completed",
    },
    "reference": {"type": "item_reference", "id": "m-7"},
    "compaction": {"type": "compaction", "id": "c-1", "encrypted_content": "xyz"},
    "approval request": {
        "type": "mcp_approval_request",
        "id": "p",
        "arguments": "{}",
        "name": "rm",
        "server_label": "s",
    },
    "numbers": {
        "role": "user",
        "content": "n",
        "big": 2**63,
        "negative": -5,
        "fraction": 0.1,
        "none": None,
        "yes": True,
    },
    "half a character": {"role": "user", "content": "\ud83d"},
    "a huge number": {"role": "user", "content": "n", "huge": 2**70},
    "a type of the future": {"type": "telepathy_call", "id": "t-1", "nested": {"list": [1, [2, {"three": 3}]]}},
}
"""One item each: it must come back equal, alone."""

ADD, GET, POP, CLEAR = "add", "get", "pop", "clear"
SEQUENCES: dict[str, list[tuple[str, Any]]] = {
    "nothing": [(GET, None), (POP, None), (CLEAR, None), (GET, None), (POP, None)],
    "a turn": [(ADD, [USER, REASONING, CALL, RESULT, ANSWER]), (GET, None), (GET, 2), (GET, 0), (GET, -1), (GET, 99)],
    "one at a time": [(ADD, [USER]), (ADD, [CALL]), (ADD, [RESULT]), (ADD, [ANSWER]), (GET, None)],
    "equal items": [(ADD, [USER, USER, USER]), (GET, None), (POP, None), (GET, None)],
    "parallel calls": [
        (ADD, [CALL, {**CALL, "call_id": "b"}, {**RESULT, "call_id": "b"}, RESULT, ANSWER]),
        (GET, None),
        (GET, 3),
    ],
    "popping to the end": [(ADD, [USER, CALL, RESULT]), *[(POP, None)] * 5, (GET, None)],
    "popping and adding": [(ADD, [USER, ANSWER]), (POP, None), (ADD, [REASONING, ANSWER]), (POP, None), (GET, None)],
    "clearing": [(ADD, [USER, ANSWER]), (CLEAR, None), (GET, None), (POP, None), (ADD, [USER]), (GET, None)],
    "results before calls": [(ADD, [RESULT, CALL, ANSWER, USER]), (GET, None), (POP, None), (POP, None), (GET, None)],
    "nothing added": [(ADD, []), (GET, None), (ADD, [USER]), (ADD, []), (GET, None), (GET, 1)],
    "every kind": [(ADD, list(SINGLE.values())), (GET, None), (GET, 7), (POP, None), (POP, None), (GET, None)],
}


@pytest.fixture
async def carrel_session(tmp_path: Path) -> AsyncIterator[CarrelSession]:
    async with CarrelSession(base=tmp_path / "base", session_id="a") as session:
        yield session


@pytest.fixture(autouse=True)
def no_tracing() -> None:
    agents.set_tracing_disabled(True)


async def results(session: AgentsSession, steps: list[tuple[str, Any]]) -> list[Any]:
    found: list[Any] = []
    for step, argument in steps:
        if step == ADD:
            found.append(await session.add_items(argument))
        elif step == GET:
            found.append(await session.get_items(argument))
        elif step == POP:
            found.append(await session.pop_item())
        else:
            found.append(await session.clear_session())
    return found


def test_the_tables_are_large_enough() -> None:
    assert len(SINGLE) >= 20
    assert len(SEQUENCES) >= 10


@pytest.mark.parametrize("name", SINGLE)
async def test_an_item_comes_back_as_from_sqlite(name: str, carrel_session: CarrelSession) -> None:
    steps = [(ADD, [SINGLE[name]]), (GET, None), (GET, 1), (POP, None), (GET, None), (POP, None)]
    expected = await results(SQLiteSession("a"), steps)
    assert expected[1] == [SINGLE[name]]
    assert await results(carrel_session, steps) == expected


@pytest.mark.parametrize("name", SEQUENCES)
async def test_a_sequence_gives_what_sqlite_gives(name: str, carrel_session: CarrelSession) -> None:
    assert await results(carrel_session, SEQUENCES[name]) == await results(SQLiteSession("a"), SEQUENCES[name])


async def test_the_limit_of_the_settings(tmp_path: Path) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(9)]
    async with CarrelSession(base=tmp_path, limit=2) as session:
        assert isinstance(session, AgentsSession)
        await session.add_items(items)
        assert await session.get_items() == items[-2:]
        assert await session.get_items(4) == items[-4:]


async def test_a_session_that_is_handed_in(tmp_path: Path) -> None:
    async with Session(MemoryStorage()) as session:
        async with CarrelSession(session) as memory:
            assert memory.session_id == session.id
            await memory.add_items([USER, ANSWER])
        loaded = await session.storage.get_session_store().load_session(session.id)
        assert loaded is not None
        assert [message["role"] for message in loaded["messages"]] == ["user", "assistant"]


async def test_messages_of_another_program_become_items(tmp_path: Path) -> None:
    async with CarrelSession(base=tmp_path, session_id="a") as session:
        await session.add_items([USER])
        async with FileStorage(tmp_path) as storage:
            message = assistant_message([text_block("from elsewhere")], provider="anthropic")
            await storage.get_session_store().append_message("a", message)
        first, second = await session.get_items()
        assert first == USER
        assert "from elsewhere" in str(second)
        assert await session.pop_item() == second
        assert await session.get_items() == [USER]


# --- under the SDK's Runner -------------------------------------------------------------------------------------------


def scripted(*turns: list[Any]) -> Any:
    """A model with scripted answers that keeps its inputs in `inputs`."""

    class Scripted(agents.Model):
        def __init__(self) -> None:
            self.turns = list(turns)
            self.inputs: list[Any] = []

        async def get_response(self, system_instructions: Any, input: Any, *more: Any, **named: Any) -> Any:
            self.inputs.append(input)
            return agents.ModelResponse(output=self.turns.pop(0), usage=agents.Usage(), response_id=None)

        def stream_response(self, *args: Any, **named: Any) -> Any:
            raise NotImplementedError

    return Scripted()


def says(text: str) -> Any:
    content = responses.ResponseOutputText(text=text, type="output_text", annotations=[])
    return responses.ResponseOutputMessage(
        id=f"m-{text}", content=[content], role="assistant", status="completed", type="message"
    )


def calls(name: str, arguments: str) -> Any:
    return responses.ResponseFunctionToolCall(call_id=f"c-{name}", name=name, arguments=arguments, type="function_call")


@agents.function_tool
def add(a: int, b: int) -> int:
    return a + b


async def test_a_conversation_continues_in_another_program(tmp_path: Path) -> None:
    thought = responses.ResponseReasoningItem(id="r-1", summary=[], type="reasoning", encrypted_content="xyz")
    async with CarrelSession(base=tmp_path, session_id="sums", model="scripted") as first:
        model = scripted([thought, calls("add", '{"a": 1, "b": 2}')], [says("Three.")])
        done = await agents.Runner.run(agents.Agent(name="sums", model=model, tools=[add]), "1 + 2?", session=first)
        assert done.final_output == "Three."

    async with CarrelSession(base=tmp_path, session_id="sums") as again:
        model = scripted([says("Sure.")])
        await agents.Runner.run(agents.Agent(name="sums", model=model, tools=[add]), "Sure?", session=again)
    [request] = model.inputs
    assert [item.get("type", item.get("role")) for item in request] == [
        *("user", "reasoning", "function_call", "function_call_output", "message", "user")
    ]
    assert request[1]["encrypted_content"] == "xyz"
    assert request[3]["output"] == "3"
    async with FileStorage(tmp_path) as storage:
        [meta] = await storage.get_session_store().list_sessions()
    assert (meta["title"], meta["model"]) == ("1 + 2?", "scripted")


async def test_a_conversation_continues_after_its_process_was_killed(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from carrel.adapters.openai_agents import CarrelSession

        async def main():
            session = CarrelSession(base=sys.argv[1], session_id="a")
            await session.add_items([{"role": "user", "content": str(number)} for number in range(50)])
            await session.pop_item()
            print("added", flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    assert first_line_before_kill(program, tmp_path) == "added"
    async with CarrelSession(base=tmp_path, session_id="a") as session:
        assert [item["content"] for item in await session.get_items()] == [str(number) for number in range(49)]
        model = scripted([says("Yes.")])
        await agents.Runner.run(agents.Agent(name="a", model=model), "Well?", session=session)
        assert len(model.inputs[0]) == 50


async def test_a_call_that_was_never_answered_is_in_no_request(carrel_session: CarrelSession) -> None:
    await carrel_session.add_items([USER, CALL])
    model = scripted([says("Yes.")])
    await agents.Runner.run(agents.Agent(name="a", model=model), "Well?", session=carrel_session)
    assert [item.get("content") for item in model.inputs[0]] == ["Hello.", "Well?"]
    assert CALL in await carrel_session.get_items()


async def test_parallel_calls_keep_their_order(carrel_session: CarrelSession) -> None:
    both = [calls("add", '{"a": 1, "b": 2}'), calls("add", '{"a": 1, "b": 2}')]
    both[1].call_id = "c-2"
    model = scripted(both, [says("Three.")])
    await agents.Runner.run(agents.Agent(name="a", model=model, tools=[add]), "Twice?", session=carrel_session)
    items = await carrel_session.get_items()
    assert [item.get("call_id", item.get("role")) for item in items] == [
        *("user", "c-add", "c-2", "c-add", "c-2", "assistant")
    ]
    assert model.inputs[1] == items[:-1]
