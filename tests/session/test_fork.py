"""A fork of a whole session: what was conversation, what is known and what was made branch off together."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from carrel import (
    ConversationStorage,
    ForkRefused,
    MemoryStorage,
    Session,
    SubprocessConfig,
    SubprocessExecutor,
    user_text_message,
)
from carrel.errors import ExecutorClosed


@pytest.fixture
def sandboxed(base: Path) -> Session:
    return Session.from_base(base, sandbox="required")


async def test_variables_files_and_conversation_are_forked_together(sandboxed: Session) -> None:
    async with sandboxed as session:
        conversation = await session.converse("Stars")
        conversation.create_user_message("How far is Vega?")
        await session.run("x = [1]")
        await session.write_file("notes.txt", "one")

        branch = await session.fork()
        async with branch:
            assert type(branch) is Session
            assert branch.id != session.id
            assert branch.conversation is not None
            assert branch.conversation.id == branch.id
            assert [message.get_text_content() for message in branch.conversation.messages] == ["How far is Vega?"]
            branch.conversation.create_user_message("And the moon?")
            await ConversationStorage(branch.storage.get_session_store()).update(branch.conversation)
            await branch.run("x.append(2)")
            await branch.write_file("notes.txt", "two")
            assert (await branch.run("x, tools.echo.say(words='hi'), workflows.double(number=4)")).value == (
                ([1, 2], "hi\n", 8)
            )

        assert (await session.run("x, open('notes.txt').read()")).value == ([1], "one")
        store = session.storage.get_session_store()
        kept = await store.load_session(session.id)
        assert kept is not None
        assert len(kept["messages"]) == 1
        assert [child["id"] for child in await store.children(session.id)] == [branch.id]


async def test_a_stored_conversation_is_forked_too(sandboxed: Session) -> None:
    async with sandboxed as session:
        store = session.storage.get_session_store()
        await store.append_message(session.id, user_text_message("added by another program"))
        async with await session.fork() as branch:
            conversation = await branch.converse()
            assert [message.get_text_content() for message in conversation.messages] == ["added by another program"]


async def test_a_fork_of_a_session_without_a_conversation_has_none(sandboxed: Session) -> None:
    async with sandboxed as session, await session.fork() as branch:
        assert branch.conversation is None
        assert await session.storage.get_session_store().list_sessions() == []


async def test_a_fork_outlives_its_original_and_has_its_functions(sandboxed: Session) -> None:
    sandboxed.register_tool(lambda: "here", name="where", description="Where this is")
    async with sandboxed as session:
        branch = await session.fork()
    try:
        assert (await branch.run("tools.where()")).value == "here"
        await branch.save_artifact("kept", "by the fork")
        again = await branch.fork()
        await again.close()
        assert await branch.load_artifact("kept") == "by the fork"
    finally:
        await branch.close()


async def test_a_fork_with_a_storage_of_its_own_gets_a_copy_of_the_library() -> None:
    async with Session(MemoryStorage(), SubprocessExecutor(SubprocessConfig(sandbox="required"))) as session:
        await session.save_artifact("shared", 1)
        async with await session.fork(storage=MemoryStorage()) as branch:
            await branch.save_artifact("shared", 2)
            assert await session.load_artifact("shared") == 1


async def test_a_refused_fork_changes_nothing(base: Path) -> None:
    async with Session.from_base(base, sandbox="off") as session:
        await session.converse("Stars")
        assert not session.supports("fork")
        with pytest.raises(ForkRefused, match="not possible here"):
            await session.fork()
        assert len(await session.storage.get_session_store().list_sessions()) == 1
        assert (await session.run("1 + 1")).value == 2


async def test_a_taken_id_is_refused_and_leaves_no_process(sandboxed: Session) -> None:
    async with sandboxed as session:
        await session.converse("Stars")
        await session.storage.get_session_store().create_session("Other", session_id="taken")
        with pytest.raises(ForkRefused, match="taken exists"):
            await session.fork(session_id="taken")
        assert len(await session.storage.get_session_store().list_sessions()) == 2


class Unlucky(Session):
    """One whose forks do not get beyond their start."""

    forks: ClassVar[list[Session]] = []

    def _copy_with(self, *arguments: Any) -> Any:
        self.forks.append(super()._copy_with(*arguments))
        return self.forks[-1]

    async def start(self) -> None:
        await super().start()
        if self in self.forks:
            raise RuntimeError("no room")


async def test_a_fork_that_fails_to_start_leaves_nothing(base: Path) -> None:
    async with Unlucky.from_base(base, sandbox="required") as session:
        await session.converse("Stars")
        with pytest.raises(ForkRefused, match="no room"):
            await session.fork()
        with pytest.raises(ExecutorClosed):
            await session.forks[-1].list_tools()
        assert len(await session.storage.get_session_store().list_sessions()) == 1
        assert (await session.run("1 + 1")).value == 2


async def test_a_session_on_a_sample_can_be_forked(tmp_path: Path) -> None:
    async with Session.for_sample("demo", "calc-1", cache=tmp_path / "cache", sandbox="required") as task:
        async with await task.fork() as branch:
            assert branch.sample is not None
            await branch.execute_command("git apply -", stdin=branch.sample.patch)
            assert (await branch.verify()).outcome == "solved"
        assert (await task.verify()).outcome == "not_solved"
