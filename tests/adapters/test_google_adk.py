"""The session service against ADK's in-memory one, the code executor against its local one, and both under a Runner."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.adapters.frameworks import require

require("google.adk")

from google.adk.agents import LlmAgent
from google.adk.artifacts import InMemoryArtifactService
from google.adk.code_executors import BaseCodeExecutor, UnsafeLocalCodeExecutor
from google.adk.code_executors.code_execution_utils import CodeExecutionInput, File
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from carrel import FileStorage, MemoryStorage, RedisStorage, SyncSession
from carrel.adapters.google_adk import CarrelCodeExecutor, CarrelSessionService
from carrel.session.storage import StorageBackend

pytestmark = pytest.mark.real


def event(number: int, text: str = "hi", **settings: Any) -> Event:
    content = types.Content(role="user", parts=[types.Part(text=text), types.Part(inline_data=BLOB)])
    return Event(id=f"e{number}", author="user", timestamp=1000.0 + number, content=content, **settings)


BLOB = types.Blob(data=b"\x00\xff", mime_type="application/octet-stream")
CHANGES = {"own": [1, {"a": None}], "user:name": "Ann", "app:theme": "dark", "temp:now": 1}
A = {"app_name": "app", "user_id": "ann"}


async def create_and_get(service: BaseSessionService) -> Any:
    state = {"x": 1, "user:y": 2, "app:z": 3, "temp:t": 4}
    made = await service.create_session(**A, state=state, session_id=" s1 ")
    generated = await service.create_session(**A)
    return [
        described(made),
        described(await service.get_session(**A, session_id="s1")),
        len(generated.id) > 10,
        generated.state,
        await service.get_session(**A, session_id="none"),
        await service.get_session(app_name="other", user_id="ann", session_id="s1"),
    ]


async def create_twice(service: BaseSessionService) -> Any:
    await service.create_session(**A, session_id="s")
    with pytest.raises(AlreadyExistsError):
        await service.create_session(**A, session_id="s")
    other = await service.create_session(app_name="app", user_id="bob", session_id="s")
    return described(other)


async def append(service: BaseSessionService) -> Any:
    session = await service.create_session(**A, state={"own": 0, "kept": 1}, session_id="s")
    for number in range(3):
        actions = EventActions(state_delta={**CHANGES, "number": number})
        await service.append_event(session, event(number, actions=actions))
    await service.append_event(session, event(9, partial=True))
    other = await service.create_session(**A, session_id="other")
    stranger = await service.create_session(app_name="app", user_id="bob", session_id="s")
    return [
        described(session),
        described(await service.get_session(**A, session_id="s")),
        described(other),
        described(stranger),
    ]


async def append_again(service: BaseSessionService) -> Any:
    session = await service.create_session(**A, session_id="s")
    await service.append_event(session, event(1))
    await service.append_event(session, event(1))
    await service.append_event(session, event(1, "another text"))
    return described(await service.get_session(**A, session_id="s"))


async def append_to_nothing(service: BaseSessionService) -> Any:
    session = await service.create_session(**A, session_id="s")
    await service.delete_session(**A, session_id="s")
    with pytest.raises(SessionNotFoundError):
        await service.append_event(session, event(1))
    await service.delete_session(**A, session_id="s")
    return await service.get_session(**A, session_id="s")


async def append_from_an_old_copy(service: BaseSessionService) -> Any:
    session = await service.create_session(**A, session_id="s")
    copy = await service.get_session(**A, session_id="s")
    assert copy is not None
    await service.append_event(session, event(1))
    await service.append_event(copy, event(2))
    return [described(copy), described(await service.get_session(**A, session_id="s"))]


async def get_some(service: BaseSessionService) -> Any:
    session = await service.create_session(**A, session_id="s")
    for number in (1, 5, 3, 7):
        await service.append_event(session, event(number))
    wanted = [
        GetSessionConfig(num_recent_events=0),
        GetSessionConfig(num_recent_events=2),
        GetSessionConfig(num_recent_events=9),
        GetSessionConfig(after_timestamp=1004),
        GetSessionConfig(after_timestamp=2000),
        GetSessionConfig(after_timestamp=0),
        GetSessionConfig(num_recent_events=3, after_timestamp=1007),
    ]
    return [described(await service.get_session(**A, session_id="s", config=config)) for config in wanted]


async def list_them(service: BaseSessionService) -> Any:
    for user, name in (("ann", "b"), ("ann", "a"), ("bob", "c"), ("a/b ☃", "d")):
        session = await service.create_session(app_name="app", user_id=user, session_id=name, state={"n": name})
        await service.append_event(session, event(ord(name[0])))
    await service.create_session(app_name="other", user_id="ann", session_id="e", state={"app:z": 1})
    return [
        [described(one) for one in (await service.list_sessions(app_name="app")).sessions],
        [described(one) for one in (await service.list_sessions(app_name="app", user_id="ann")).sessions],
        (await service.list_sessions(app_name="app", user_id="none")).sessions,
        (await service.list_sessions(app_name="none")).sessions,
    ]


async def delete(service: BaseSessionService) -> Any:
    for name in ("a", "b"):
        await service.create_session(**A, session_id=name, state={"user:kept": name})
    await service.delete_session(**A, session_id=" a ")
    rest = (await service.list_sessions(app_name="app")).sessions
    return [[one.id for one in rest], await service.get_user_state(**A)]


async def user_state(service: BaseSessionService) -> Any:
    before = await service.get_user_state(**A)
    session = await service.create_session(**A, state={"user:a": 1, "user:b": [1]})
    await service.append_event(session, event(1, actions=EventActions(state_delta={"user:a": 2})))
    return [before, await service.get_user_state(**A), await service.get_user_state(app_name="app", user_id="bob")]


async def flush(service: BaseSessionService) -> Any:
    return await service.flush()


CASES: list[Callable[[BaseSessionService], Awaitable[Any]]] = [
    create_and_get,
    create_twice,
    append,
    append_again,
    append_to_nothing,
    append_from_an_old_copy,
    get_some,
    list_them,
    delete,
    user_state,
    flush,
]


def described(session: Any) -> Any:
    """What two services must agree on; the time of a session without events is the machine's."""
    if session is None:
        return None
    about = session.model_dump()
    if session.last_update_time > 1_000_000:
        about["last_update_time"] = "now"
    return about


@pytest.fixture(params=["files", "memory", "redis"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StorageBackend]:
    found: StorageBackend
    if request.param == "redis":
        found = RedisStorage(request.getfixturevalue("redis_url"), f"adk-{tmp_path.name}")
    else:
        found = FileStorage(tmp_path) if request.param == "files" else MemoryStorage()
    async with found:
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_service_answers_as_the_one_in_memory(
    case: Callable[[BaseSessionService], Awaitable[Any]], storage: StorageBackend
) -> None:
    assert await case(CarrelSessionService(storage)) == await case(InMemorySessionService())


def test_the_cases_call_every_public_method() -> None:
    source = "".join(inspect.getsource(case) for case in CASES)
    methods = {name for name, member in vars(BaseSessionService).items() if callable(member) and name[0] != "_"}
    assert BaseSessionService.__abstractmethods__ <= methods
    assert [name for name in sorted(methods) if f"service.{name}(" not in source] == []


async def test_changes_of_shared_state_at_the_same_time_are_kept(storage: StorageBackend) -> None:
    service = CarrelSessionService(storage)
    sessions = [await service.create_session(**A) for _ in range(8)]
    changes = [EventActions(state_delta={f"user:{number}": number}) for number in range(8)]
    await asyncio.gather(
        *(
            service.append_event(one, event(n, actions=c))
            for n, (one, c) in enumerate(zip(sessions, changes, strict=True))
        )
    )
    assert await service.get_user_state(**A) == {str(number): number for number in range(8)}


# --- code -------------------------------------------------------------------------------------------------------------

CODES = {
    "prints": "print('one')\nprint('two')",
    "nothing": "x = 1",
    "an exception": "print('begun')\n1 / 0",
    "wrong syntax": "x = ",
    "warnings": "import sys\nprint('careful', file=sys.stderr)",
    "a clean exit": "import sys\nprint('one')\nsys.exit(0)",
    "a failed exit": "import sys\nsys.exit(3)",
    "not ASCII": "print('☃')",
    "a file": "open('/tmp/adk-test', 'w').write('x')\nprint(open('/tmp/adk-test').read())",
    "main": "if __name__ == '__main__':\n    print('main')",
}


@pytest.fixture
def executor() -> Iterator[CarrelCodeExecutor]:
    with SyncSession(MemoryStorage()) as session:
        yield CarrelCodeExecutor(session)


def context(session_id: str = "s") -> Any:
    return SimpleNamespace(session=SimpleNamespace(app_name="app", user_id="ann", id=session_id))


@pytest.mark.parametrize("name", CODES)
def test_code_gives_what_the_local_executor_gives(name: str, executor: CarrelCodeExecutor) -> None:
    one, other = (each.execute_code(context(), CodeExecutionInput(CODES[name])) for each in (executor, LOCAL))
    assert (one.stdout, one.exit_code, bool(one.stderr)) == (other.stdout, other.exit_code, bool(other.stderr))
    if name != "a failed exit":  # the local one names the status in a sentence, carrel shows the SystemExit
        assert other.stderr.splitlines()[-1:] == one.stderr.splitlines()[-1:]


LOCAL = UnsafeLocalCodeExecutor()


def test_the_only_abstract_method_is_execute_code() -> None:
    assert BaseCodeExecutor.__abstractmethods__ == {"execute_code"}


def test_files_images_and_variables(executor: CarrelCodeExecutor) -> None:
    files = [File("a/data.csv", "b25lLHR3bw==", "text/csv"), File("plain.txt", "no base64!")]
    executor.execute_code(context(), CodeExecutionInput("x = open('data.csv').read()", files))
    done = executor.execute_code(context(), CodeExecutionInput("print(x, open('plain.txt').read())"))
    assert done.stdout == "one,two no base64!\n"
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    [image] = executor.execute_code(context(), CodeExecutionInput(plot)).output_files
    assert (image.name, image.mime_type, bytes(image.content[:4])) == ("image-1.png", "image/png", b"\x89PNG")


def test_code_that_takes_too_long() -> None:
    with SyncSession(MemoryStorage()) as session:
        executor = CarrelCodeExecutor(session, timeout_seconds=1)
        done = executor.execute_code(context(), CodeExecutionInput("print('begun', flush=True)\nwhile True: pass"))
    assert (done.stdout, done.exit_code, "1" in done.stderr) == ("begun\n", 1, True)


def test_each_session_of_adk_has_a_session_of_its_own(tmp_path: Path) -> None:
    executor = CarrelCodeExecutor(base=tmp_path)
    try:
        executor.execute_code(context("one"), CodeExecutionInput("x = 1"))
        assert "NameError" in executor.execute_code(context("two"), CodeExecutionInput("print(x)")).stderr
        assert executor.execute_code(context("one"), CodeExecutionInput("print(x)")).stdout == "1\n"
    finally:
        executor.close()


# --- under a Runner ---------------------------------------------------------------------------------------------------


class ScriptedModel(BaseLlm):
    texts: list[str]

    async def generate_content_async(self, request: Any, stream: bool = False) -> AsyncIterator[LlmResponse]:
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text=self.texts.pop(0))]))


async def test_an_agent_with_code_continues_in_another_program(tmp_path: Path) -> None:
    with SyncSession(MemoryStorage()) as session:
        for texts in (["```python\nx = 6 * 7\nprint(x)\n```", "It is 42."], ["```python\nprint(x)\n```", "Still."]):
            agent = LlmAgent(
                name="coder",
                model=ScriptedModel(model="scripted", texts=texts),
                code_executor=CarrelCodeExecutor(session),
            )
            async with FileStorage(tmp_path) as storage:
                runner = Runner(
                    agent=agent,
                    app_name="app",
                    session_service=CarrelSessionService(storage),
                    artifact_service=InMemoryArtifactService(),
                    auto_create_session=True,
                )
                message = types.Content(role="user", parts=[types.Part(text="Compute.")])
                events = [one async for one in runner.run_async(user_id="ann", session_id="s", new_message=message)]
            outputs = [part.code_execution_result for one in events for part in (one.content.parts or [])]
            assert ["42" in (found.output or "") for found in outputs if found] == [True]
    async with FileStorage(tmp_path) as storage:
        kept = await CarrelSessionService(storage).get_session(**A, session_id="s")
    assert kept is not None
    texts = [part.text for one in kept.events for part in one.content.parts if part.text]
    assert [text for text in texts if "42" in text or text == "Still."][-1] == "Still."
