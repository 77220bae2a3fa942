"""The programs in examples/, run with the real SDKs and a scripted model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from carrel import (
    FileStorage,
    MemoryStorage,
    Session,
    SessionStore,
    assistant_message,
    text_block,
    tool_use_block,
)
from examples import agent_loop, attempts
from tests.support.lazy_module import LazyModule

agents = LazyModule("agents")
responses = LazyModule("openai.types.responses")
pydantic_ai = LazyModule("pydantic_ai")
function_model = LazyModule("pydantic_ai.models.function")
openai_agents_session = LazyModule("examples.openai_agents_session")
pydantic_ai_tool = LazyModule("examples.pydantic_ai_tool")

ROOT = Path(__file__).parents[1]


def test_each_example_is_on_the_page() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in (ROOT / "examples").glob("*.*"))
    assert sorted(set(re.findall(r"\(\.\./examples/(\w+\.\w+)\)", page))) == files


# --- a loop of one's own ----------------------------------------------------------------------------------------------


async def test_the_agent_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    await agent_loop.main()
    assert capsys.readouterr().out == "There are four words.\n"
    async with FileStorage(tmp_path / ".carrel") as storage:
        store = storage.get_session_store()
        [meta] = await store.list_sessions()
        kept = await store.load_session(meta["id"])
    assert kept is not None
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"] * 4
    blocks = [message["content"][0] for message in kept["messages"]]
    results = [block for block in blocks if block["type"] == "tool_result"]
    assert ["NameError" in result["model_text"] for result in results] == [False, True, False]
    assert [result["is_error"] for result in results] == [False, True, False]
    assert results[-1]["model_text"] == "4"


async def test_the_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    await attempts.main()
    assert capsys.readouterr().out.splitlines() == [
        "attempt 1: exit code 0, not_solved",
        "attempt 2: exit code 0, not_solved",
        "attempt 3: exit code 0, solved",
        "messages now: 2",
    ]


def test_the_agent_loop_is_a_page_long() -> None:
    assert len((ROOT / "examples" / "agent_loop.py").read_text().splitlines()) <= 60


# --- the OpenAI Agents SDK --------------------------------------------------------------------------------------------


def scripted(*turns: list[Any]) -> Any:
    """A model with scripted answers that keeps its inputs in `inputs`."""

    class Scripted(agents.Model):  # type: ignore[misc]
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


@pytest.fixture
def no_tracing() -> None:
    agents.set_tracing_disabled(True)


async def test_the_agents_sdk_goes_on_where_it_left_off(tmp_path: Path, no_tracing: None) -> None:
    @agents.function_tool
    def add(a: int, b: int) -> int:
        return a + b

    async with SessionStore(tmp_path) as store:
        first = openai_agents_session.KeptSession("sums", store, model="scripted")
        assert isinstance(first, agents.Session)
        thought = responses.ResponseReasoningItem(id="r-1", summary=[], type="reasoning", encrypted_content="xyz")
        model = scripted([thought, calls("add", '{"a": 1, "b": 2}')], [says("Three.")])
        done = await agents.Runner.run(agents.Agent(name="sums", model=model, tools=[add]), "1 + 2?", session=first)
        assert done.final_output == "Three."

    async with SessionStore(tmp_path) as store:  # another program, another day
        again = openai_agents_session.KeptSession("sums", store)
        model = scripted([says("Sure.")])
        await agents.Runner.run(agents.Agent(name="sums", model=model, tools=[add]), "Sure?", session=again)
        [request] = model.inputs
        assert [item.get("type", item.get("role")) for item in request] == [
            "user",
            "reasoning",
            "function_call",
            "function_call_output",
            "message",
            "user",
        ]
        assert request[1]["encrypted_content"] == "xyz"
        assert request[3]["output"] == "3"
        [meta] = await store.list_sessions()
        assert (meta["title"], meta["model"]) == ("1 + 2?", "scripted")


async def test_items_are_counted_taken_back_and_cleared(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        session = openai_agents_session.KeptSession("a", store)
        assert await session.get_items() == []
        assert await session.pop_item() is None
        await session.clear_session()
        items = [{"role": "user", "content": str(number)} for number in range(4)]
        await session.add_items(items)
        await session.add_items([])
        assert await session.get_items() == items
        assert await session.get_items(limit=2) == items[2:]
        assert await session.get_items(limit=0) == []
        assert await session.get_items(limit=9) == items
        assert await session.pop_item() == items[3]
        assert await session.get_items() == items[:3]
        await session.add_items([{"type": "reasoning", "id": "r", "summary": []}])
        assert await session.pop_item() == {"type": "reasoning", "id": "r", "summary": []}
        assert await session.get_items() == items[:3]
        await session.clear_session()
        assert await session.get_items() == []
        assert len([entry async for entry in store.iter_entries("a")]) >= 8, "the log keeps all of it"


async def test_the_sdk_sees_only_the_newest_items_on_request(tmp_path: Path, no_tracing: None) -> None:
    async with SessionStore(tmp_path) as store:
        session = openai_agents_session.KeptSession("a", store, limit=2)
        await session.add_items([{"role": "user", "content": str(number)} for number in range(9)])
        model = scripted([says("Yes.")])
        await agents.Runner.run(agents.Agent(name="a", model=model), "Well?", session=session)
        assert [item["content"] for item in model.inputs[0]] == ["7", "8", "Well?"]


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Both, please."},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "reasoning", "id": "r-1", "summary": [], "encrypted_content": "xyz"},
    {
        "type": "function_call",
        "id": "f-1",
        "call_id": "a",
        "name": "look",
        "arguments": '{ "x":1 }',
        "status": "completed",
    },
    {"type": "function_call", "id": "f-2", "call_id": "b", "name": "look", "arguments": "not JSON"},
    {"type": "function_call_output", "call_id": "b", "output": "second"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "first"}]},
    {"type": "web_search_call", "id": "w-1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+1"},
    {"type": "item_reference", "id": "m-7"},
    {"role": "assistant", "content": "Done."},
]


async def test_items_come_back_as_they_were(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        session = openai_agents_session.KeptSession("a", store)
        await session.add_items(ITEMS)
        assert await session.get_items() == ITEMS
        for number, item in enumerate(ITEMS):  # each alone: a call without its answer, an answer without its call
            lone = openai_agents_session.KeptSession(f"lone-{number}", store)
            await lone.add_items([item])
            assert await lone.get_items() == [item]
            assert await lone.pop_item() == item
            assert await lone.get_items() == []
            assert await lone.pop_item() is None
    async with SessionStore(tmp_path) as store:
        again = openai_agents_session.KeptSession("a", store)
        popped = []
        while (item := await again.pop_item()) is not None:
            popped.append(item)
            assert len(popped) <= len(ITEMS), "popping ends"
        assert popped == ITEMS[::-1]


async def test_a_call_that_was_never_answered_is_in_no_request(tmp_path: Path, no_tracing: None) -> None:
    async with SessionStore(tmp_path) as store:
        session = openai_agents_session.KeptSession("a", store)
        await session.add_items([{"role": "user", "content": "Look."}, ITEMS[3]])
    async with SessionStore(tmp_path) as store:
        session = openai_agents_session.KeptSession("a", store)
        model = scripted([says("Yes.")])
        await agents.Runner.run(agents.Agent(name="a", model=model), "Well?", session=session)
        assert [item.get("content") for item in model.inputs[0]] == ["Look.", "Well?"]
        assert ITEMS[3] in await session.get_items()


async def test_parallel_calls_keep_their_order(tmp_path: Path, no_tracing: None) -> None:
    @agents.function_tool
    def add(a: int, b: int) -> int:
        return a + b

    def call(call_id: str) -> Any:
        return responses.ResponseFunctionToolCall(
            call_id=call_id, name="add", arguments='{"a": 1, "b": 2}', type="function_call"
        )

    async with SessionStore(tmp_path) as store:
        session = openai_agents_session.KeptSession("a", store)
        model = scripted([call("c-1"), call("c-2")], [says("Three.")])
        await agents.Runner.run(agents.Agent(name="a", model=model, tools=[add]), "Twice?", session=session)
        items = await session.get_items()
        assert [item.get("call_id", item.get("role")) for item in items] == [
            *("user", "c-1", "c-2", "c-1", "c-2", "assistant")
        ]
        assert model.inputs[1] == items[:-1]


async def test_items_of_another_program_are_read_and_popped(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        session = openai_agents_session.KeptSession("a", store)
        await session.add_items(ITEMS[:1])
        blocks = [text_block("Looking."), tool_use_block(tool_id="t", name="look")]
        await store.append_message("a", assistant_message(blocks, provider="anthropic"))
        items = await session.get_items()
        assert [item.get("type", item.get("role")) for item in items][:3] == ["user", "message", "function_call"]
        popped = []
        while (item := await session.pop_item()) is not None:
            popped.append(item)
            assert len(popped) <= len(items), "popping ends"
        assert popped == items[::-1]


# --- pydantic-ai ------------------------------------------------------------------------------------------------------


async def test_a_pydantic_ai_agent_writes_code() -> None:
    codes = iter(["x = [1, 2", "x = [1, 2]\nprint('made')", "tools.double(sum(x))"])
    instructions: list[str | None] = []

    def speak(messages: list[Any], info: Any) -> Any:
        instructions.append(info.instructions)
        code = next(codes, None)
        part = pydantic_ai.TextPart("Six.") if code is None else pydantic_ai.ToolCallPart("run_code", {"code": code})
        return pydantic_ai.ModelResponse(parts=[part])

    async with Session(MemoryStorage()) as session:
        session.register_tool(lambda number: number * 2, name="double", description="Twice a number.")
        with pydantic_ai.capture_run_messages() as messages:
            done = await pydantic_ai_tool.coder(function_model.FunctionModel(speak)).run("Double the sum", deps=session)
    assert done.output == "Six."
    assert "Twice a number." in (instructions[0] or "")
    parts = [part for message in messages for part in message.parts]
    returned = [part for part in parts if part.part_kind == "tool-return"]
    assert [part.outcome for part in returned] == ["retried", "success", "success"]
    assert "SyntaxError" in str(returned[0].content)
    assert [part.content for part in returned[1:]] == [
        {"printed": "made\n", "value": "None"},
        {"printed": "", "value": "6"},
    ]


# --- a notebook -------------------------------------------------------------------------------------------------------


def run_cell(client: Any, source: str) -> dict[str, Any]:
    """Run a cell in a kernel; return what it prints and the last value in all its forms."""
    shown: dict[str, Any] = {"printed": ""}

    def note(message: dict[str, Any]) -> None:
        content = message["content"]
        assert message["header"]["msg_type"] != "error", content["traceback"]
        shown["printed"] += content.get("text", "")
        shown.update(content.get("data", {}))

    client.execute_interactive(source, timeout=60, output_hook=note)
    return shown


def test_the_notebook_in_a_jupyter_kernel() -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    manager, client = start_new_kernel()
    try:
        shown = [run_cell(client, "".join(cell["source"])) for cell in cells]
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    for cell, now in zip(cells, shown, strict=True):
        stored: dict[str, Any] = {"printed": ""}
        for output in cell["outputs"]:
            stored["printed"] += "".join(output.get("text", ()))
            stored |= output.get("data", {})
        assert stored.keys() == now.keys()
        assert stored["printed"] == now["printed"]
    assert any("data:image/png;base64," in now.get("text/html", "") for now in shown)
    assert "<td><pre>6.5</pre></td>" in shown[1]["text/html"]
