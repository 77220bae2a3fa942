"""The checkpoint savers against LangGraph's own conformance suite, on each kind of storage, and under a graph."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, TypedDict

import pytest

from tests.adapters.frameworks import require

require("langgraph")

from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from carrel import FileStorage, MemoryStorage, RedisStorage
from carrel.adapters.langgraph import AsyncCarrelSaver, CarrelSaver
from carrel.session.storage import StorageBackend

pytestmark = pytest.mark.real

CAPABILITIES = 8
TESTS = 81


@pytest.mark.parametrize("storage_kind", ["files", "memory", "redis"])
@pytest.mark.parametrize("saver", [AsyncCarrelSaver, CarrelSaver])
async def test_the_conformance_suite_passes(
    saver: type[AsyncCarrelSaver], storage_kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    storage: StorageBackend
    if storage_kind == "redis":
        storage = RedisStorage(request.getfixturevalue("redis_url"), f"langgraph-{saver.__name__}")
    else:
        storage = FileStorage(tmp_path) if storage_kind == "files" else MemoryStorage()

    async def new_saver() -> AsyncGenerator[BaseCheckpointSaver[Any]]:
        yield saver(storage)

    try:
        report = await validate(checkpointer_test(name=f"{saver.__name__} {storage_kind}")(new_saver))
    finally:
        await storage.close()
    failures = {name: result.failures for name, result in report.results.items() if result.failures}
    assert failures == {}
    assert [name for name, result in report.results.items() if not result.passed] == []
    assert len(report.results) == CAPABILITIES
    assert sum(result.tests_passed for result in report.results.values()) == TESTS


# --- under graphs -----------------------------------------------------------------------------------------------------


class State(TypedDict):
    total: int
    answer: str


def ask(state: State) -> dict[str, Any]:
    return {"answer": interrupt(f"is {state['total']} right?")}


def compile_graph(saver: BaseCheckpointSaver[Any]) -> Any:
    builder = StateGraph(State)
    builder.add_node("add", lambda state: {"total": state["total"] + 1})
    builder.add_node("ask", ask)
    builder.add_edge(START, "add")
    builder.add_edge("add", "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


def history(graph: Any, config: Any) -> list[Any]:
    return [
        (state.values, state.next, state.metadata["step"], len(state.tasks))
        for state in graph.get_state_history(config)
    ]


def test_a_graph_waits_and_continues_in_another_program(tmp_path: Path) -> None:
    config: Any = {"configurable": {"thread_id": "a/../b ☃"}}
    expected = compile_graph(InMemorySaver())
    expected.invoke({"total": 1}, config)
    with_carrel = compile_graph(CarrelSaver(FileStorage(tmp_path)))
    assert "__interrupt__" in with_carrel.invoke({"total": 1}, config)
    assert history(with_carrel, config) == history(expected, config)

    again = compile_graph(CarrelSaver(FileStorage(tmp_path)))
    assert again.invoke(Command(resume="yes"), config) == expected.invoke(Command(resume="yes"), config)
    assert again.get_state(config).values == {"total": 2, "answer": "yes"}
    assert history(again, config) == history(expected, config)


async def test_a_graph_that_is_awaited(tmp_path: Path) -> None:
    config: Any = {"configurable": {"thread_id": 7}}  # a number, as some programs use
    async with FileStorage(tmp_path) as storage:
        graph = compile_graph(AsyncCarrelSaver(storage))
        await graph.ainvoke({"total": 1}, config)
        assert await graph.ainvoke(Command(resume="no"), config) == {"total": 2, "answer": "no"}
        assert [state.metadata["step"] async for state in graph.aget_state_history(config)] == [2, 1, 0, -1]


async def test_long_names_and_names_that_are_no_paths(tmp_path: Path) -> None:
    names = ["", ".", "..", "a/b", "x" * 300, "child:" + "|".join(f"sub:{number}" for number in range(200))]
    async with FileStorage(tmp_path) as storage:
        saver = AsyncCarrelSaver(storage)
        for thread in names[1:]:
            for namespace in names:
                config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": namespace}}
                await saver.aput(config, empty_checkpoint(), {"source": "loop", "step": 0}, {})
        found = {tuple(one.config["configurable"].values())[:2] async for one in saver.alist(None)}
        assert found == {(thread, namespace) for thread in names[1:] for namespace in names}
        await saver.adelete_thread("..")
        assert len([one async for one in saver.alist(None)]) == 4 * 6


async def test_pruning_keeps_what_delta_channels_are_rebuilt_from(tmp_path: Path) -> None:
    async with FileStorage(tmp_path) as storage:
        saver = AsyncCarrelSaver(storage)
        config: Any = {"configurable": {"thread_id": "a", "checkpoint_ns": ""}}
        ids = []
        for step in range(5):
            checkpoint = empty_checkpoint()
            if step == 2:  # a snapshot of the channel; later checkpoints hold only its changes
                checkpoint["channel_values"] = {"log": "snapshot"}
            counters = {"counters_since_delta_snapshot": {"log": (0, 0)}}
            config = await saver.aput(config, checkpoint, {"source": "loop", "step": step, **counters}, {})
            ids.append(checkpoint["id"])
        await saver.aprune(["a"])
        kept = [one.checkpoint["id"] async for one in saver.alist({"configurable": {"thread_id": "a"}})]
        assert kept == ids[:1:-1]
        with pytest.raises(ValueError, match="keep_latest"):
            await saver.aprune(["a"], strategy="all")
