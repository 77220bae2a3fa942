"""An embedder of the user's choice: for sessions and storages, and the recipe of the documentation."""

import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from carrel import FileStorage, MemoryStorage, Session, user_text_message

PAGE = Path(__file__).parents[3] / "docs" / "search.md"
SOURCE = "def run():\n    return 1\n"


class TopicEmbedder:
    """Knows two topics, and counts the texts it embeds."""

    name = "topics-1"
    dimensions = 2

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self.texts += texts
        return [[float("moon" in text or "lunar" in text), float("bread" in text)] for text in texts]


async def test_the_embedder_of_a_storage(tmp_path: Path) -> None:
    embedder = TopicEmbedder()
    async with FileStorage(tmp_path, embedder=embedder) as storage:
        await storage.get_workflow_library().add("orbit", SOURCE, "Computes a moon")
        assert [w["name"] for w in await storage.get_workflow_library().search("lunar")] == ["orbit"]
        await storage.get_artifact_store().save("picture", b"", "A moon")
        assert [a["name"] for a in await storage.get_artifact_store().search("lunar")] == ["picture"]
        await storage.get_session_store().append_message("a", user_text_message("the moon is full"))
        assert [hit.session_id for hit in await storage.get_session_store().search("lunar")] == ["a"]


async def test_the_embedder_of_a_session(tmp_path: Path) -> None:
    embedder = TopicEmbedder()
    async with Session.inprocess(tmp_path, embedder=embedder) as session:

        def phase() -> str:
            """Tells the phase of the moon."""
            return "full"

        session.register_tool(phase)
        assert [tool["name"] for tool in await session.search_tools("lunar")] == ["phase"]
        await session.add_workflow("orbit", SOURCE, "Computes a moon")
        assert [w["name"] for w in await session.search_workflows("lunar")] == ["orbit"]
    assert embedder.texts.count("lunar") == 2


async def test_a_session_uses_the_embedder_of_its_storage(tmp_path: Path) -> None:
    embedder = TopicEmbedder()
    async with Session(MemoryStorage(embedder=embedder)) as session:
        session.register_tool(lambda: "full", name="moon")
        assert [tool["name"] for tool in await session.search_tools("lunar")] == ["moon"]
    assert embedder.texts


async def test_without_an_embedder_only_words_count(tmp_path: Path) -> None:
    async with Session.inprocess(tmp_path, embedder=False) as session:
        await session.add_workflow("bake_bread", SOURCE, "A recipe for a loaf")
        assert await session.search_workflows("pastry oven") == []
        assert [w["name"] for w in await session.search_workflows("baking bread")] == ["bake_bread"]


@pytest.mark.parametrize("wrong", ["default", True, object()])
def test_an_invalid_embedder_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(TypeError, match="is not an Embedder"):
        FileStorage(tmp_path, embedder=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not an Embedder"):
        Session(MemoryStorage(), embedder=wrong)  # type: ignore[arg-type]


class FakeTextEmbedding:
    """Stands for fastembed's class, whose models cannot be downloaded here: the same call and the same answer."""

    def __init__(self, model_name: str) -> None:
        assert model_name == "BAAI/bge-small-en-v1.5"

    def embed(self, documents: list[str]) -> Iterator[list[float]]:
        assert isinstance(documents, list)
        for text in documents:
            yield [1.0 if number == ("moon" in text or "lunar" in text) else 0.0 for number in range(384)]


async def test_the_example_for_fastembed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fastembed")
    module.TextEmbedding = FakeTextEmbedding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastembed", module)
    monkeypatch.chdir(tmp_path)
    [recipe] = re.findall(r"^```py\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(recipe, names)
    session = names["session"]
    assert isinstance(session, Session)
    async with session:
        await session.add_workflow("orbit", SOURCE, "Computes a moon")
        await session.add_workflow("loaf", SOURCE, "Bakes")
        assert (await session.search_workflows("lunar"))[0]["name"] == "orbit"
