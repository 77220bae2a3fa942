"""The trace: every step of a session in order, with the run it belongs to, without secrets."""

import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from carrel import MemoryStorage, Session
from carrel.tracing import OtelExporter, StepRecorder

from .conftest import Open


async def test_each_step_is_a_line_of_the_trace(session: Session) -> None:
    await session.run("print('x' * 10)\ntools.echo.say(words='hi')\nworkflows.double(2)")
    await session.run("1/0")
    await session.execute_command("exit 3")
    await session.call_tool("echo.say", words="again")
    steps = await session.trace()
    assert [(step["kind"], step["name"], step["outcome"]) for step in steps] == [
        ("tool", "echo.say", "ok"),
        ("workflow", "double", "ok"),
        ("run", "print('x' * 10)", "ok"),
        ("run", "1/0", "error"),
        ("command", "exit 3", "ok"),
        ("tool", "echo.say", "ok"),
    ]
    tool, workflow, run, failed, command, alone = steps
    assert tool["parent"] == workflow["parent"] == run["id"]
    assert "parent" not in alone
    assert run["sizes"]["stdout"] == 11
    assert failed["error_type"] == "ZeroDivisionError"
    assert command["exit_code"] == 3
    assert all(step["duration"] >= 0 and step["started_at"].endswith("+00:00") for step in steps)


async def test_a_damaged_line_costs_that_line(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    await session.run("1")
    assert len(await session.trace()) == 1
    await session.storage.store.append(f"sessions/{session.id}/trace.jsonl", [b'{"damaged'])
    await session.run("2")
    assert [step["name"] for step in await session.trace()] == ["1", "2"]
    assert "line 2 of" in caplog.text


async def test_the_trace_is_a_file_beside_the_conversation(session: Session, base: Path) -> None:
    conversation = await session.converse("A talk")
    message = conversation.create_user_message("Run it")
    await message
    await session.run("1")
    steps = await session.trace()
    assert steps[-1]["message"] == message.id
    folder = base / "sessions" / session.id
    assert (folder / "trace.jsonl").read_text().count("\n") == len(steps)
    assert (folder / "messages.jsonl").exists()


async def test_a_trace_alone_is_not_listed_as_a_conversation(session: Session) -> None:
    await session.run("1")
    await session.trace()
    assert await session.storage.get_session_store().list_sessions() == []


async def test_the_trace_has_no_secrets(open_session: Open, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOOR_KEY", "open-sesame-42")
    (base / "tools" / "door.yaml").write_text(
        "name: door\ncommand: sh -c 'echo $KEY >&2; exit 1'\nenv: {KEY: '${DOOR_KEY}'}\n"
    )
    session = await open_session()
    result = await session.run("tools.door()")
    assert result.error_type == "ToolCallError"
    assert "open-sesame" not in str(result)
    await session.close()
    assert "open-sesame" not in (base / "sessions" / session.id / "trace.jsonl").read_text()


async def test_steps_are_spans_where_open_telemetry_is_set_up(tmp_path: Path) -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    async with Session.inprocess(tmp_path) as session:
        session.register_tool(lambda: 1, name="one")
        await session.run("tools.one()")
    spans = {span.name: span for span in kept.get_finished_spans()}
    tool, run = spans["execute_tool one"], spans["execute_tool run_code"]
    assert tool.parent is not None
    assert tool.parent.span_id == run.context.span_id
    assert tool.attributes
    assert tool.attributes["gen_ai.tool.name"] == "one"
    assert tool.attributes["gen_ai.conversation.id"] == session.id


def test_without_a_tracer_provider_there_are_no_spans() -> None:
    """The mcp package imports OpenTelemetry, which is no reason to create spans."""
    script = "import mcp, sys\nfrom carrel.tracing import otel_exporter\nassert 'opentelemetry.trace' in sys.modules\n"
    subprocess.run([sys.executable, "-c", script + "assert otel_exporter('s') is None"], check=True, timeout=60)


async def test_a_session_in_memory_leaves_nothing() -> None:
    async with Session(MemoryStorage()) as session:
        assert (await session.run("artifacts.save('a', 1)\nartifacts.load('a')")).value == 1


async def test_invalid_characters_are_replaced(session: Session) -> None:
    assert (await session.run("x = '\ud83d'")).error_type == "UnicodeEncodeError"
    assert [item async for item in session.stream("y = '\ud83d'")]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        await session.execute_command("echo '\ud83d'")
    assert (await session.run("raise ValueError(chr(0xd83d))")).error is not None
    assert (await session.run("1")).value == 1
    names = [line["name"] for line in await session.trace()]
    assert names[:3] == ["x = '?'", "y = '?'", "echo '?'"]
    assert names[-1] == "1"


async def test_a_secret_at_the_cut_edge_is_redacted(
    open_session: Open, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_TOKEN", "sk-at-the-very-edge-0123456789")
    (base / "tools" / "edge.yaml").write_text('name: edge\ncommand: "true"\nenv: {T: "${EDGE_TOKEN}"}\n')
    session = await open_session()
    await session.run("tools.edge()")
    await session.run("#" * 480 + "sk-at-the-very-edge-0123456789")
    assert "sk-at-the" not in str(await session.trace())


@pytest.mark.parametrize(
    ("body", "outcome", "error_type"),
    [
        ("import os\n    os._exit(3)", "error", "Crashed"),
        ("import time\n    time.sleep(60)", "timeout", "Timeout"),
    ],
)
async def test_a_killed_workflow_has_a_line(base: Path, body: str, outcome: str, error_type: str) -> None:
    async with Session.subprocess(base) as session:
        await session.add_workflow("die", f"def run():\n    {body}\n", "")
        await session.run("workflows.die()", timeout=1)
        [workflow, run] = await session.trace()
    assert (workflow["kind"], workflow["name"], workflow["parent"]) == ("workflow", "die", run["id"])
    assert (workflow["outcome"], workflow["error_type"]) == (outcome, error_type)


def test_the_span_of_a_workflow_ends_with_its_run() -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    steps = StepRecorder([OtelExporter("s", provider.get_tracer("tests"))])
    with steps.run("workflows.die()"):
        steps.start_workflow("die")
    assert [span.name for span in kept.get_finished_spans()] == ["execute_tool die", "execute_tool run_code"]


async def test_listing_recipes_is_not_a_tool_call(session: Session) -> None:
    assert (await session.run("len(tools.echo.list())")).value == 1
    assert [step["kind"] for step in await session.trace()] == ["run"]
