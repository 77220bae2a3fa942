"""Checkpoints and rewind of a whole session: conversation, variables and files together."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel import (
    Checkpoint,
    Conversation,
    ConversationStorage,
    ExecutorClosed,
    ForkRefused,
    InProcessExecutor,
    MemoryStorage,
    RedisStorage,
    Session,
    SessionStore,
    StorageWriteError,
    WorkerLost,
    user_text_message,
)
from carrel.conversation.models import conversation as conversation_module
from carrel.execution.config import Limits
from carrel.execution.executor import ExecutorCheckpoint
from carrel.guest.sandbox.cgroups import hierarchies
from carrel.session import MAX_CHECKPOINTS
from tests.session.conftest import executor_of
from tests.support.real_redis import RealRedis


@pytest.fixture
def sandboxed(base: Path) -> Session:
    return Session.from_base(base, sandbox="required")


def texts_of(conversation: Conversation | None) -> list[str]:
    assert conversation is not None
    return [message.get_text_content() for message in conversation.messages]


async def state_of(session: Session) -> object:
    return (await session.run("x, sorted(os.listdir()), open('notes.txt').read()")).value


async def test_rewind_restores_all_three_and_the_log_keeps_every_entry(sandboxed: Session) -> None:
    async with sandboxed as session:
        conversation = await session.converse("Stars")
        conversation.create_user_message("How far is Vega?")
        await session.run("import os\nx = [1]")
        await session.write_file("notes.txt", "one")
        point = await session.checkpoint("before")
        assert (point.label, point.message_count) == ("before", 1)

        conversation.create_user_message("And the moon?")
        await session.run("x.append(2)")
        await session.write_file("notes.txt", "two")
        await session.write_file("more.txt", "more")
        await session.execute_command("echo shell >> notes.txt")
        assert await session.rewind(point) == point

        assert session.conversation is conversation
        assert texts_of(conversation) == ["How far is Vega?"]
        assert await state_of(session) == ([1], ["notes.txt"], "one")
        store = session.storage.get_session_store()
        assert len([entry async for entry in store.iter_messages(session.id)]) == 1
        assert "And the moon?" in store.messages_path(session.id).read_text()

        conversation.create_user_message("And Mars?")
        await ConversationStorage(store).update(conversation)
        kept = await store.load_session(session.id)
        assert kept is not None
        assert [message["content"][0]["text"] for message in kept["messages"]] == ["How far is Vega?", "And Mars?"]


async def test_repeated_rewinds_backward_and_forward(sandboxed: Session) -> None:
    async with sandboxed as session:
        conversation = await session.converse()
        points = []
        for number in range(3):
            conversation.create_user_message(f"message {number}")
            await session.run(f"x = {number}")
            points.append(await session.checkpoint())
        for number in (0, 2, 1, 1, 0):
            await session.rewind(points[number])
            assert (await session.run("x")).value == number
            assert texts_of(conversation) == [f"message {n}" for n in range(number + 1)]
            await session.run("x = 'spoiled'")
        assert session.checkpoints() == points


async def test_a_checkpoint_is_found_by_id_label_or_message_count(sandboxed: Session) -> None:
    async with sandboxed as session:
        store = session.storage.get_session_store()
        await session.run("x = 0")
        first = await session.checkpoint("start")
        await store.append_message(session.id, user_text_message("added by another program"))
        await session.run("x = 1")
        await session.checkpoint("later")
        await session.run("x = 2")
        newest = await session.checkpoint("later")

        for name, value in (("start", 0), (1, 2), ("later", 2), (first.id, 0), (0, 0), (newest, 2)):
            await session.rewind(name)
            assert (await session.run("x")).value == value
        await session.rewind("start")
        assert [entry async for entry in store.iter_messages(session.id)] == []
        assert (await session.checkpoint(first.id)).id != first.id
        await session.rewind(first.id)
        assert (await session.run("x")).value == 0
        await session.checkpoint()
        for nowhere in ("nowhere", "", 7, Checkpoint("other", 0, 0, session.id)):
            with pytest.raises(ForkRefused, match="there are: 'start'"):
                await session.rewind(nowhere)
        with pytest.raises(TypeError, match="is not a checkpoint"):
            await session.rewind(1.5)  # type: ignore[arg-type]


async def test_a_session_works_normally_after_a_rewind(sandboxed: Session) -> None:
    sandboxed.register_tool(lambda: "here", name="where", description="Where this is")
    async with sandboxed as session:
        await session.run("def double(n):\n    return 2 * n")
        point = await session.checkpoint()
        await session.run("del double")
        await session.execute_command("sleep 600 & echo started")
        await session.rewind(point)
        assert await session.processes() == []
        assert (await session.run("double(4), tools.where(), workflows.double(number=4)")).value == (8, "here", 8)
        result = await session.run("import os\nos._exit(1)")
        assert (result.error_type, result.state) == ("Crashed", "restored")
        assert (await session.run("double(4)")).value == 8


async def test_rewind_after_the_variables_were_lost_or_reset(sandboxed: Session) -> None:
    async with sandboxed as session:
        await session.run("x = 1")
        await session.checkpoint("good")
        await session.reset()
        await session.rewind("good")
        assert (await session.run("x")).value == 1


async def test_drop_checkpoint_and_the_maximum(sandboxed: Session) -> None:
    async with sandboxed as session:
        points = [await session.checkpoint(str(number)) for number in range(MAX_CHECKPOINTS)]
        with pytest.raises(ForkRefused, match="drop_checkpoint"):
            await session.checkpoint("one more")
        await session.drop_checkpoint(points[0])
        with pytest.raises(ForkRefused, match="there is no checkpoint"):
            await session.rewind(points[0])
        await session.checkpoint("one more")
        await session.rewind("one more")


async def test_a_killed_checkpoint_is_refused_and_nothing_changes(sandboxed: Session) -> None:
    async with sandboxed as session:
        conversation = await session.converse()
        await session.run("x = 1")
        point = await session.checkpoint()
        conversation.create_user_message("more")
        # A fork's processes can be seen and signalled by whom it was forked from.
        await session.run(
            "import os, signal\nx = 2\n"
            "mine = {os.getpid(), os.getppid(), 1}\n"
            "others = [int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) not in mine]\n"
            "for pid in others:\n"
            "    try:\n        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\n"
        )
        for _ in range(2):
            with pytest.raises(ForkRefused, match="gone"):
                await session.rewind(point)
        assert (await session.run("x")).value == 2
        assert texts_of(conversation) == ["more"]


OF_THE_MOMENT = (
    "import os, signal\n"
    "def moments():\n"
    "    found = []\n"
    "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
    "        rows = open(f'/proc/{pid}/status').read().splitlines()\n"
    "        found += [int(pid) for row in rows if row.startswith('NSpid:') and len(row.split()) > 2]\n"
    "    return found\n"
    "def signalled(pid, number):\n"
    "    try:\n        os.kill(pid, number)\n        return True\n    except OSError:\n        return False\n"
)


async def test_code_cannot_see_change_or_stop_a_checkpoint(sandboxed: Session) -> None:
    async with sandboxed as session:
        await session.run("x = 1")
        point = await session.checkpoint()
        await session.run(OF_THE_MOMENT)
        tried = await session.run(
            "x, opened = 2, []\n"
            "for pid in moments():\n"
            "    for name in ('mem', 'environ', 'root/etc/passwd', 'cwd/.'):\n"
            "        try:\n"
            "            os.close(os.open(f'/proc/{pid}/{name}', os.O_RDONLY))\n"
            "            opened.append(name)\n"
            "        except PermissionError:\n            pass\n"
            "opened, [signalled(pid, signal.SIGSTOP) for pid in moments()].count(True)"
        )
        assert tried.value == ([], 1)
        await session.rewind(point)
        assert (await session.run("x")).value == 1


async def test_a_checkpoint_that_does_not_answer_is_abandoned(
    sandboxed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carrel.execution.local_transport.READY", 1.0)
    async with sandboxed as session:
        await session.run("x = 1")
        point = await session.checkpoint()
        await session.run(
            f"{OF_THE_MOMENT}x, kept = 2, moments()\n"
            "if os.fork() == 0:\n    while True:\n        [signalled(pid, signal.SIGSTOP) for pid in kept]"
        )
        for why in ("did not answer", "gone"):
            with pytest.raises(ForkRefused, match=why):
                await session.rewind(point)
        assert (await session.run("x")).value == 2


async def test_a_stopped_interpreter_is_continued_for_a_checkpoint(sandboxed: Session) -> None:
    async with sandboxed as session:
        await session.run("x = 1")
        await session.checkpoint("before")
        await session.run("x = 2")
        worker = (await session.run("import os\nos.getpid()")).value
        await session.execute_command(f"(sleep 0.5; kill -STOP {worker}) & echo begun")
        watched = Path(f"/proc/self/fdinfo/{session.executor._connection.transport._worker_fd}")  # type: ignore[attr-defined]
        there = next(line.split()[1] for line in watched.read_text().splitlines() if line.startswith("Pid:"))
        for _ in range(3000):
            if "\nState:\tT" in Path(f"/proc/{there}/status").read_text():
                break
            await asyncio.sleep(0.02)
        await session.checkpoint()
        assert (await session.run("x")).value == 2
        await session.rewind("before")
        assert (await session.run("x")).value == 1


async def test_a_checkpoint_out_of_memory_says_so(base: Path) -> None:
    if "memory" not in hierarchies():
        pytest.skip("no memory cgroup can be made here")
    async with Session.from_base(base, sandbox="required", limits=Limits(memory=200 << 20)) as session:
        await session.run("x = bytearray(b'x' * (80 << 20))")
        for number in range(4):
            await session.checkpoint(str(number))
            await session.run(f"for at in range(0, len(x), 4096):\n    x[at] = {number}")
        refused = []
        for number in range(4):
            try:
                await session.rewind(str(number))
            except ForkRefused as problem:
                refused.append(str(problem))
        assert refused
        assert all("more memory than it may" in why for why in refused)
        assert (await session.run("1 + 1")).value == 2


async def test_a_rewind_cancelled_while_queued_changes_nothing(sandboxed: Session) -> None:
    async with sandboxed as session:
        await session.run("x = 1")
        point = await session.checkpoint()
        await session.run("x = 2")
        waiting = asyncio.create_task(
            session.run("import os, time\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)")
        )
        await asyncio.sleep(0)
        going_back = asyncio.create_task(session.rewind(point))
        await asyncio.wait([going_back], timeout=0.2)
        going_back.cancel()
        await asyncio.wait([going_back])
        assert going_back.cancelled()
        await session.execute_command("touch /tmp/go")
        assert (await waiting).is_ok
        assert (await session.run("x")).value == 2


async def test_a_rewind_ends_a_command_that_runs(sandboxed: Session) -> None:
    async with sandboxed as session:
        point = await session.checkpoint()
        begun = asyncio.Event()
        command = asyncio.create_task(session.execute_command("echo begun; sleep 600", on_output=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 60)
        await session.rewind(point)
        with pytest.raises(WorkerLost, match="rewound"):
            await asyncio.wait_for(command, 60)
        assert await session.processes() == []


async def test_close_ends_a_rewind_and_all_checkpoints(sandboxed: Session) -> None:
    async with sandboxed as session:
        await session.run("x = 1")
        points = [await session.checkpoint() for _ in range(3)]
        tasks = [asyncio.create_task(session.rewind(point)) for point in points]
        await asyncio.sleep(0.01)
        await session.close()
        for problem in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(problem, Checkpoint | ForkRefused | WorkerLost | ExecutorClosed)


async def test_a_log_that_cannot_be_written_leaves_the_variables_alone(
    sandboxed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandboxed as session:
        conversation = await session.converse()
        conversation.create_user_message("one")
        await session.run("x = 1")
        point = await session.checkpoint()
        conversation.create_user_message("two")
        await session.run("x = 2")

        async def full(*args: object, **kwargs: object) -> int:
            raise StorageWriteError("no space left on the disk")

        store = session.storage.get_session_store()
        for place, name in ((store, "append_rewind"), (conversation_module, "read_log")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, full)
                with pytest.raises(ForkRefused, match="no space left"):
                    await session.rewind(point)
            assert (await session.run("x")).value == 2
            assert (
                texts_of(conversation) == ["one", "two"] == texts_of(await ConversationStorage(store).get(session.id))
            )
        await session.rewind(point)
        assert (await session.run("x")).value == 1
        assert texts_of(conversation) == ["one"]


async def test_rewind_over_redis_and_with_a_lost_server(start_redis: Callable[..., RealRedis], base: Path) -> None:
    server = start_redis(appendonly="yes", appendfsync="always")
    async with (
        RedisStorage(server.url) as mine,
        RedisStorage(server.url) as others,
        Session(mine, executor_of("sandboxed", base=base)) as session,
    ):
        theirs = ConversationStorage(others.get_session_store())
        conversation = await session.converse()
        conversation.create_user_message("one")
        await session.run("x = 1")
        point = await session.checkpoint()
        conversation.create_user_message("two")
        await session.run("x = 2")
        await ConversationStorage(mine.get_session_store()).update(conversation)
        assert texts_of(await theirs.get(session.id)) == ["one", "two"]

        server.kill()
        with pytest.raises(ForkRefused, match=r"(?i)redis"):
            await session.rewind(point)
        assert (await session.run("x")).value == 2
        server.start()
        assert texts_of(conversation) == ["one", "two"] == texts_of(await theirs.get(session.id))

        await session.rewind(point)
        assert (await session.run("x")).value == 1
        assert texts_of(conversation) == ["one"] == texts_of(await theirs.get(session.id))


async def test_a_cancelled_rewind_restores_all_three_or_none(
    sandboxed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandboxed as session:
        conversation = await session.converse()
        conversation.create_user_message("one")
        await session.run("x = 1")
        point = await session.checkpoint()
        conversation.create_user_message("two")
        await session.run("x = 2")
        going_back = asyncio.Event()
        rewind = session.executor.rewind

        async def signalling_rewind(to: ExecutorCheckpoint, then: object = None) -> None:
            going_back.set()
            await rewind(to, then)  # type: ignore[arg-type]

        monkeypatch.setattr(session.executor, "rewind", signalling_rewind)
        task = asyncio.create_task(session.rewind(point))
        await going_back.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await session.run("x")).value == 1
        assert texts_of(conversation) == ["one"]


async def test_message_objects_stay_usable_after_a_rewind(sandboxed: Session) -> None:
    async with sandboxed as session:
        conversation = await session.converse()
        await conversation.create_user_message("Keep this")
        call = conversation.create_assistant_message()
        call.add_tool_call("c1", "checkpoint", {})
        conversation.create_assistant_message()  # empty, and kept
        point = await session.checkpoint()
        assert point.message_count == 3
        call.add_text("spoiled")
        gone = conversation.create_user_message("more")
        question = conversation.messages[0]
        await session.rewind(point)
        assert [message.role for message in conversation.messages] == ["user", "assistant", "assistant"]
        assert conversation.messages[0] is question
        assert not conversation.messages[1].get_tool_results()

        gone.add_text("not visible")
        await gone
        question.add_text("please")
        await question
        conversation.messages[1].add_tool_result("c1", "kept")
        await conversation.messages[1]
        read = await ConversationStorage(session.storage.get_session_store()).get(session.id)
        assert read is not None
        assert [message.get_text_content() for message in read.messages] == ["Keep this\nplease", "", ""]
        assert len(read.messages[1].get_tool_results()) == 1


async def test_messages_added_during_a_rewind_are_kept(sandboxed: Session) -> None:
    async with sandboxed as session:
        conversation = await session.converse()
        await conversation.create_user_message("one")
        point = await session.checkpoint()
        await conversation.create_user_message("two")
        going_back = asyncio.create_task(session.rewind(point))
        number = 0
        while not going_back.done():
            conversation.create_user_message(f"meanwhile {number}")
            number += 1
            await asyncio.sleep(0.001)
        await going_back
        added = [text for text in texts_of(conversation) if text.startswith("meanwhile")]
        store = ConversationStorage(session.storage.get_session_store())
        await store.update(conversation)
        assert texts_of(conversation) == ["one", *added] == texts_of(await store.get(session.id))
        log = session.storage.get_session_store().messages_path(session.id).read_text()
        assert all(f"meanwhile {n}" in log for n in range(number))


async def test_a_deleted_conversation_refuses_rewind(sandboxed: Session) -> None:
    async with sandboxed as session:
        store = session.storage.get_session_store()
        await store.append_message(session.id, user_text_message("one"))
        await session.run("x = 1")
        point = await session.checkpoint()
        await session.run("x = 2")
        await store.delete_session(session.id)
        with pytest.raises(ForkRefused, match="deleted"):
            await session.rewind(point)
        await store.append_message(session.id, user_text_message("another of this name"))
        with pytest.raises(ForkRefused, match="deleted"):
            await session.rewind(point)
        assert (await session.run("x")).value == 2


async def test_another_conversation_refuses_rewind(sandboxed: Session) -> None:
    async with sandboxed as session:
        point = await session.checkpoint()
        conversations = ConversationStorage(session.storage.get_session_store())
        session.conversation = await conversations.create(
            Conversation(info={"id": "another", "project_dir": "", "working_dir": ""})
        )
        with pytest.raises(ForkRefused, match="another conversation"):
            await session.rewind(point)


async def test_checkpoint_is_refused_where_fork_is(base: Path) -> None:
    for session in (Session.from_base(base, sandbox="off"), Session.inprocess(base)):
        async with session:
            assert not session.supported_capabilities() & {"fork", "checkpoint", "rewind"}
            with pytest.raises(ForkRefused, match="fork"):
                await session.checkpoint("before")
            with pytest.raises(ForkRefused, match="there are: none"):
                await session.rewind("before")
            assert (await session.run("1 + 1")).value == 2


class _OfOtherPeople(InProcessExecutor):
    """An executor that was written before there were checkpoints."""

    checkpoint = rewind = None  # type: ignore[assignment]

    def supported_capabilities(self) -> set[str]:
        return {"fork"}


async def test_an_executor_without_checkpoints_is_enough() -> None:
    async with Session(MemoryStorage(), _OfOtherPeople()) as session:  # type: ignore[arg-type]
        assert session.supported_capabilities() == {"fork"}
        with pytest.raises(ForkRefused, match="could not be kept"):
            await session.checkpoint()
        assert (await session.run("1 + 1")).value == 2


async def test_checkpoints_are_traced_and_end_with_the_session(sandboxed: Session) -> None:
    async with sandboxed as session:
        assert {"checkpoint", "rewind"} <= session.supported_capabilities()
        point = await session.checkpoint("before")
        await session.rewind(point)
        steps = [(step["kind"], step["name"], step["checkpoint"]) for step in await session.trace()]
        assert steps == [("checkpoint", "before", point.id), ("rewind", "before", point.id)]
    assert session.checkpoints() == []
    with pytest.raises(ExecutorClosed, match="closed"):
        await session.rewind(point)


async def test_a_fork_has_checkpoints_of_its_own(sandboxed: Session) -> None:
    async with sandboxed as session:
        await session.run("x = 1")
        point = await session.checkpoint()
        async with await session.fork() as branch:
            assert branch.checkpoints() == []
            await branch.run("x = 2")
            await branch.checkpoint("mine")
            await branch.run("x = 3")
            await session.rewind(point)
            await branch.rewind("mine")
            assert [(await one.run("x")).value for one in (session, branch)] == [1, 2]


async def test_verify_after_a_rewind(tmp_path: Path) -> None:
    async with Session.for_sample("demo", "calc-1", cache=tmp_path / "cache", sandbox="required") as task:
        assert task.sample is not None
        point = await task.checkpoint()
        await task.execute_command("git apply -", stdin=task.sample.patch)
        # The workspace is copied before a rewind can change it.
        verdict, _ = await asyncio.gather(task.verify(), task.rewind(point))
        assert verdict.outcome == "solved"
        assert (await task.verify()).outcome == "not_solved"
        assert await task.changed_files() == []


async def test_any_order_of_rewinds_matches_a_simple_model(base: Path) -> None:
    draw = random.Random(7)
    for _ in range(3):
        async with Session.from_base(base, sandbox="required") as session:
            conversation = await session.converse()
            await session.run("x = []")
            await session.write_file("f", "")
            texts, numbers, written = list[str](), list[int](), ""
            kept: list[tuple[Checkpoint, tuple[list[str], list[int], str]]] = []
            for step in range(25):
                match draw.choice(["say", "run", "write", "write", "keep", "back", "back", "crash"]):
                    case "say":
                        conversation.create_user_message(f"message {step}")
                        texts.append(f"message {step}")
                    case "run":
                        await session.run(f"x.append({step})")
                        numbers.append(step)
                    case "write":
                        await session.execute_command(f"printf {step}, >> f")
                        written += f"{step},"
                    case "keep" if len(kept) < 6:
                        kept.append((await session.checkpoint(str(step)), (list(texts), list(numbers), written)))
                    case "back" if kept:
                        point, (then, known, made) = draw.choice(kept)
                        await session.rewind(draw.choice((point, point.id, point.label)))
                        texts, numbers, written = list(then), list(known), made
                    case "crash":
                        assert (await session.run("import os\nos._exit(1)")).state == "restored"
                assert texts_of(conversation) == texts
                assert (await session.run("x, open('f').read()")).value == (numbers, written)
            # What another process would read.
            await ConversationStorage(session.storage.get_session_store()).update(conversation)
            assert texts_of(await ConversationStorage(SessionStore(base / "sessions")).get(session.id)) == texts
