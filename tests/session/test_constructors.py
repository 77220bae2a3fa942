"""The constructors of Session: options, what they refuse, start and close."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrel import (
    CarrelError,
    ConfigurationError,
    FileStorage,
    InProcessConfig,
    InProcessExecutor,
    Limits,
    MemoryStorage,
    Mount,
    Session,
    SessionIdRefused,
    SubprocessConfig,
    SubprocessExecutor,
)
from tests.support.web_server import Answer, WebServer

from .conftest import Open


@pytest.mark.parametrize("wrong", [None, "a folder", 7, object()])
def test_a_wrong_storage_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="FileStorage"):
        Session(wrong)  # type: ignore[arg-type]


def test_the_storage_is_required() -> None:
    with pytest.raises(TypeError):
        Session()  # type: ignore[call-arg]


@pytest.mark.parametrize("wrong", ["subprocess", "in-process", 7, SubprocessExecutor, SubprocessConfig()])
def test_a_wrong_executor_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"SubprocessExecutor.*InProcessExecutor"):
        Session(MemoryStorage(), wrong)  # type: ignore[arg-type]


def test_the_default_executor_is_the_sandboxed_one() -> None:
    session = Session(MemoryStorage())
    assert isinstance(session.executor, SubprocessExecutor)
    assert session.executor.config.sandbox in (None, "auto")


def test_executors_take_their_config_by_position_and_keyword() -> None:
    assert SubprocessExecutor(SubprocessConfig(default_timeout=3)).config.default_timeout == 3
    assert SubprocessExecutor(config=SubprocessConfig(default_timeout=3)).config.default_timeout == 3
    assert InProcessExecutor(InProcessConfig(default_timeout=3)).config.default_timeout == 3
    assert InProcessExecutor(config=InProcessConfig(default_timeout=3)).config.default_timeout == 3


@pytest.mark.parametrize("make", [Session.from_base, Session.subprocess, Session.inprocess])
@pytest.mark.parametrize("spelled", ["text", "path"])
async def test_a_missing_folder_is_created_and_the_home_expanded(
    make: object, spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    base = "~/deep/in/it"
    session: Session = make(Path(base) if spelled == "path" else base)  # type: ignore[operator]
    assert (tmp_path / "deep" / "in" / "it").is_dir()
    await session.save_artifact("a.txt", "x")
    assert (tmp_path / "deep" / "in" / "it" / "artifacts" / "a.txt").read_text() == "x"
    await session.close()


def test_a_storage_expands_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FileStorage("~/x").base_path == tmp_path / "x"


@pytest.mark.parametrize("make", [Session.from_base, Session.subprocess, Session.inprocess, Session.container])
def test_every_constructor_takes_persist_and_an_id(make: Callable[..., Session], tmp_path: Path) -> None:
    assert make(tmp_path, persist=True).id != ""
    assert make(tmp_path, persist=False, session_id="").id != ""
    assert make(tmp_path, persist=None, session_id="named").id == "named"


@pytest.mark.parametrize(
    ("make", "seconds"), [(Session.from_base, 30.0), (Session.subprocess, 60.0), (Session.inprocess, 30.0)]
)
def test_default_timeouts(make: object, seconds: float, tmp_path: Path) -> None:
    assert make(tmp_path).executor.config.default_timeout == seconds  # type: ignore[operator]
    assert make(tmp_path, timeout=None).executor.config.default_timeout is None  # type: ignore[operator]
    assert make(tmp_path, timeout=3).executor.config.default_timeout == 3  # type: ignore[operator]


async def test_the_timeout_of_the_session(open_session: Open) -> None:
    session = await open_session(timeout=0.3)
    result = await session.run("while True: pass")
    assert (result.error_type, result.state) == ("Timeout", "kept")
    assert (await session.run("import time\ntime.sleep(0.6)\n'done'", timeout=30)).value == "done"


async def test_no_limit(open_session: Open) -> None:
    session = await open_session(timeout=None)
    assert (await session.run("import time\ntime.sleep(0.2)\n7")).value == 7


async def test_start_and_close_twice(open_session: Open) -> None:
    session = await open_session()
    await asyncio.gather(session.start(), session.start())
    assert (await session.run("1")).value == 1
    await asyncio.gather(session.close(), session.close())
    await session.close()
    result = await session.run("1")
    assert (result.error, result.is_ok, result.value) == ("Session is closed", False, None)
    [streamed] = [piece async for piece in session.stream("1")]
    assert streamed.error == "Session is closed"  # type: ignore[union-attr]
    assert await session.interrupt() is False


async def test_after_close_other_methods_raise(open_session: Open) -> None:
    session = await open_session()
    await session.close()
    for asking in (
        session.start(),
        session.reset(),
        session.execute_command("true"),
        session.read_file("x"),
        session.list_tools(),
        session.list_workflows(),
        session.list_artifacts(),
        session.list_deps(),
        session.call_tool("echo.say", words="x"),
        session.describe(),
    ):
        with pytest.raises(CarrelError, match="Session is closed"):
            await asking
    with pytest.raises(CarrelError, match="Session is closed"):
        session.register_tool(len)


async def test_a_session_that_was_never_started_closes(tmp_path: Path) -> None:
    await Session.from_base(tmp_path).close()


async def test_the_first_use_starts_it(tmp_path: Path) -> None:
    session = Session.inprocess(tmp_path)
    result = await session.execute_command("echo hi")
    assert (result.stdout, result.success, result.exit_code) == ("hi\n", True, 0)
    await session.close()


async def test_session_id_and_storage(tmp_path: Path) -> None:
    storage = MemoryStorage()
    session = Session(storage, session_id="mine")
    assert (session.id, session.storage) == ("mine", storage)
    assert Session(storage).id != Session(storage).id


async def test_close_leaves_the_callers_storage_open(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    async with Session(storage, InProcessExecutor()) as session:
        await session.save_artifact("a", 1)
    async with Session(storage, InProcessExecutor()) as session:
        assert await session.load_artifact("a") == 1
    await storage.close()


# --- a wrong definition ----------------------------------------------------------------------------------------------

WRONG = "name: wrong\ncommand: [1, 2\n"


async def test_a_wrong_definition_is_named(open_session: Open, base: Path) -> None:
    (base / "tools" / "wrong.yaml").write_text(WRONG)
    with pytest.raises(ConfigurationError, match=r"wrong\.yaml"):
        await open_session()


async def test_without_starting_a_wrong_definition_is_a_result(base: Path) -> None:
    (base / "tools" / "wrong.yaml").write_text(WRONG)
    session = Session.inprocess(base)
    result = await session.run("1")
    assert result.error_type == "ConfigurationError"
    assert "wrong.yaml" in (result.error or "")
    (base / "tools" / "wrong.yaml").unlink()
    assert (await session.run("1")).value == 1, "mended, it goes on"
    await session.close()


async def test_a_wrong_definition_can_be_skipped(open_session: Open, base: Path) -> None:
    (base / "tools" / "wrong.yaml").write_text(WRONG)
    session = await open_session(on_error="skip")
    assert [tool["name"] for tool in await session.list_tools() if tool["name"].startswith("wrong")] == []
    assert (await session.run("tools.echo.say(words='x')")).value == "x\n"


# --- what is in force -------------------------------------------------------------------------------------------------


async def test_supports(open_session: Open, request: pytest.FixtureRequest) -> None:
    session = await open_session()
    names = session.supported_capabilities()
    assert all(session.supports(name) for name in names)
    assert not session.supports("telepathy")
    assert {"timeout", "reset", "deps_install", "deps_uninstall", "interrupt", "streaming"} <= names
    kind = request.node.callspec.params["open_session"]
    assert ("process_isolation" in names) == (kind != "in-process")
    assert ("filesystem_isolation" in names) == (kind == "sandboxed")
    assert "container_isolation" not in names


@pytest.mark.parametrize(("base", "workspace"), [(".carrel", "."), (".", "."), (".", "work"), ("linked/base", ".")])
def test_a_writable_workspace_around_the_base_is_refused(base: str, workspace: str, tmp_path: Path) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    (place / "work").mkdir(parents=True)
    outside.mkdir()
    # The base is elsewhere, but by a link that code could change.
    (place / "linked").symlink_to(outside)
    folder, work = place / base, place / workspace
    with pytest.raises(ConfigurationError, match=r"the base .*overlay"):
        Session.from_base(folder, workspace=work, workspace_mode="rw")
    with pytest.raises(ConfigurationError, match="the base"):
        Session.from_base(folder, mounts=[Mount(source=work, at="/data", mode="rw")])
    with pytest.raises(ConfigurationError, match="the base"):
        SubprocessConfig(base=folder, workspace=work, workspace_mode="rw")
    by_hand = SubprocessExecutor(SubprocessConfig(workspace=work, workspace_mode="rw"))
    with pytest.raises(ConfigurationError, match="the base"):
        Session(FileStorage(folder), by_hand)
    # What is only read, or changed in a copy, may be anywhere.
    SubprocessConfig(base=folder, workspace=work)
    SubprocessConfig(base=folder, workspace=work, workspace_mode="ro")
    Session(MemoryStorage(), by_hand)


@pytest.mark.parametrize("name", ["tools_path", "venv_path", "wheelhouse", "shared_in"])
def test_a_writable_workspace_around_tools_of_the_host_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "work" / "kept").mkdir(parents=True)
    settings: dict[str, Any] = {name: tmp_path / "work" / "kept"}
    with pytest.raises(ConfigurationError, match=name):
        SubprocessConfig(workspace=tmp_path / "work", workspace_mode="rw", **settings)
    SubprocessConfig(workspace=tmp_path / "work", **settings)


def test_a_writable_workspace_beside_the_base_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    Session.from_base(tmp_path / "work-base", workspace=tmp_path / "work", workspace_mode="rw")


def test_wrong_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Limits\(memory="):
        Session.from_base(tmp_path, limits={"memory": "1GB"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"limits\.memory: 'much' is not a size"):
        Limits(memory="much")
    with pytest.raises(ConfigurationError, match=r"limits\.processes"):
        Limits(processes=0)


@pytest.mark.parametrize("wrong", ["../../evil", "a/b", ".hidden"])
def test_a_wrong_id_is_refused(wrong: str) -> None:
    with pytest.raises(SessionIdRefused):
        Session(MemoryStorage(), session_id=wrong)


async def test_without_network_the_package_index_is_not_used(
    base: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = WebServer(lambda request: Answer("", 404))
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{index.url}/simple")
    (base / "requirements.txt").write_text("listed-package\n")
    try:
        async with Session.from_base(base, network=False) as session:
            for call in ("deps.add('x-7374')", "deps.sync()", "await deps.add.call_async('x-7374')"):
                result = await session.run(call)
                assert result.error_type == "DependencyError"
                assert "no network" in (result.error or "")
            assert index.requests == []
            assert (await session.run("deps.list()")).value == ["listed-package"]
            # Packages that the host adds are installed.
            assert (await session.add_dep("carrel-greeting"))["failed"] == ["carrel-greeting"]
            assert [request.path for request in index.requests] == ["/simple/carrel-greeting/"]
    finally:
        index.close()
    async with Session.from_base(base, network=False, wheelhouse=wheelhouse) as session:
        code = "deps.add('carrel-greeting')\nimport carrel_greeting\ncarrel_greeting.WORD"
        assert (await session.run(code)).value == "hello"


@pytest.mark.parametrize("make", [Session.from_base, Session.inprocess, Session.container])
async def test_an_unknown_setting_is_refused(make: Callable[..., Session], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no setting timout; did you mean timeout"):
        make(tmp_path / "base", timout=3)
    assert not (tmp_path / "base").exists()


async def test_inprocess_refuses_settings_of_the_sandbox(tmp_path: Path) -> None:
    settings: Any = {"network": False}
    with pytest.raises(TypeError, match="runs in this process has no setting network"):
        Session.inprocess(tmp_path, **settings)


async def test_a_base_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for base in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="is not a folder"):
            Session.from_base(base)
    with pytest.raises(ConfigurationError, match="an empty text"):
        Session.from_base("")
    with pytest.raises(OSError, match="the base folder /proc/none cannot be created or read: No such file"):
        Session.from_base("/proc/none")


@pytest.mark.parametrize("make", [Session.from_base, Session.inprocess, Session.container])
async def test_extra_deps_is_a_list(make: Callable[..., Session], tmp_path: Path) -> None:
    # Letter by letter, a text would be packages too.
    with pytest.raises(ConfigurationError, match=r"\['pandas'\]"):
        make(tmp_path, extra_deps="pandas")
