"""`carrel.compat.py_code_mode` has the names, signatures and behavior of py_code_mode 0.10.0.

The original is on no package index, so its outputs cannot be compared here: these tests follow its documentation."""

import asyncio
import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from carrel import errors as carrel_errors
from carrel.compat import py_code_mode
from carrel.compat.py_code_mode import (
    Capability,
    ContainerConfig,
    ContainerExecutor,
    ExecutionResult,
    Executor,
    FileStorage,
    InProcessConfig,
    InProcessExecutor,
    JsonSchema,
    RedisStorage,
    Session,
    StorageBackend,
    SubprocessConfig,
    SubprocessExecutor,
    ToolDefinition,
    errors,
)
from carrel.compat.py_code_mode.artifacts import FileArtifactStore, RedisArtifactStore
from carrel.compat.py_code_mode.deps import RuntimeDepsDisabledError, SyncResult
from carrel.compat.py_code_mode.skills import PythonSkill, SkillLibrary
from carrel.compat.py_code_mode.tools import Tool, ToolCallable, ToolParameter
from tests.compat.signatures import plain_signature, unchecked
from tests.support.real_docker import IMAGE

ECHO = """
name: echo
description: Print words
command: echo
tags: [text]
schema:
  options:
    n: {type: boolean, short: n, description: No newline}
  positional:
    - {name: text, type: string, required: true, description: What to print}
recipes:
  say: {description: Print it, params: {text: {}}}
  echo: {description: Print, params: {text: {default: hi}}}
"""
DOUBLE = '''
async def run(n: int, factor: float = 2.0, flag: bool = False, names: list = None, some: list[str] = None,
              more: dict = None, label="x", text: str = "",
              tools=None, skills=None, artifacts=None, workflows=None, deps=None):
    """Multiply a number.

    At length."""
    return n * factor
'''
PARAMETER_KEYS = ["name", "type", "description", "required", "default"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "echo.yaml").write_text(ECHO)
    (folder / "tools" / "bad.yaml").write_text("[")
    (folder / "tools" / "unnamed.yaml").write_text("description: no name")
    (folder / "skills").mkdir()
    (folder / "skills" / "double.py").write_text(DOUBLE)
    return folder


@pytest.fixture(params=["from_base", "inprocess"])
async def session(base: Path, request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    async with getattr(Session, request.param)(base) as session:
        yield session


async def value(session: Session, code: str) -> Any:
    result = await session.run(code)
    assert result.error is None, result.error
    return result.value


# --- imports and signatures ------------------------------------------------------------------------------------------

NAMES = {
    "": (
        "Session FileStorage RedisStorage SubprocessExecutor SubprocessConfig InProcessExecutor InProcessConfig "
        "ContainerExecutor ContainerConfig Executor Capability StorageBackend ExecutionResult SUBPROCESS_AVAILABLE "
        "CONTAINER_AVAILABLE CodeModeError ToolNotFoundError ToolCallError ToolTimeoutError ArtifactNotFoundError "
        "ArtifactWriteError SkillNotFoundError SkillValidationError SkillExecutionError DependencyError "
        "ConfigurationError StorageError StorageReadError StorageWriteError JsonSchema ToolDefinition"
    ),
    ".execution": (
        "SubprocessExecutor SubprocessConfig InProcessExecutor InProcessConfig ContainerExecutor ContainerConfig "
        "Capability Executor SUBPROCESS_AVAILABLE CONTAINER_AVAILABLE"
    ),
    ".storage": "FileStorage RedisStorage StorageBackend",
    ".artifacts": "Artifact FileArtifactStore RedisArtifactStore",
    ".deps": "RuntimeDepsDisabledError SyncResult",
    ".tools": "Tool ToolCallable ToolParameter",
    ".skills": "PythonSkill SkillParameter SkillMetadata SkillLibrary",
    ".workflows": "PythonSkill SkillParameter SkillMetadata SkillLibrary",
    ".errors": (
        "CodeModeError RPCError RPCTransportError NamespaceError SkillError ToolError ArtifactError DepsError "
        "ToolNotFoundError ToolCallError ToolTimeoutError ArtifactNotFoundError ArtifactWriteError SkillNotFoundError "
        "SkillValidationError SkillExecutionError DependencyError ConfigurationError StorageError StorageReadError "
        "StorageWriteError"
    ),
    ".types": "ExecutionResult",
    ".session": "Session",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_where_programs_import_them(module: str) -> None:
    found = importlib.import_module(f"carrel.compat.py_code_mode{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


LEFT_OUT = {
    "": "NamespaceBundle bootstrap_namespaces",
    ".execution": "StorageAccess register_backend",
    ".storage": "RedisToolStore registry_from_redis",
    ".artifacts": "ArtifactStoreProtocol",
    ".deps": "DepsStore PackageInstaller DepsNamespace",
    ".tools": "ToolRegistry ToolProxy load_tools_from_path",
    ".skills": "FileSkillStore VectorStore Embedder create_skill_library",
    ".workflows": "SkillStore",
}


@pytest.mark.parametrize("module", LEFT_OUT)
def test_a_name_that_is_left_out_says_why(module: str) -> None:
    found = importlib.import_module(f"carrel.compat.py_code_mode{module}")
    for name in LEFT_OUT[module].split():
        with pytest.raises(ImportError, match=f"{name}: it is an internal part"):
            getattr(found, name)
    with pytest.raises(AttributeError):
        found.unknown  # noqa: B018
    assert isinstance(py_code_mode.SUBPROCESS_AVAILABLE, bool)
    assert isinstance(py_code_mode.CONTAINER_AVAILABLE, bool)


EXECUTOR = {
    "start": "(storage=None)",
    "run": "(code, timeout=None)",
    "reset": "()",
    "close": "()",
    "list_tools": "()",
    "search_tools": "(query, limit=10)",
    "list_deps": "()",
    "add_dep": "(package)",
    "remove_dep": "(package)",
    "sync_deps": "()",
    "install_deps": "(packages)",
    "uninstall_deps": "(packages)",
    "get_configured_deps": "()",
    "supports": "(capability)",
    "supported_capabilities": "()",
}
FROM_BASE = "timeout=30.0, extra_deps=None, allow_runtime_deps=True, sync_deps_on_start=False"
SIGNATURES = {
    Session: "(storage, executor=None, sync_deps_on_start=False)",
    Session.from_base: f"(base, *, {FROM_BASE})",
    Session.inprocess: f"(base_path, *, {FROM_BASE})",
    Session.subprocess: f"(base_path, *, {FROM_BASE.replace('30', '60')}, python_version=None, cache_venv=True)",
    Session.start: "()",
    Session.close: "()",
    Session.reset: "()",
    Session.run: "(code, timeout=None)",
    Session.supports: "(capability)",
    Session.supported_capabilities: "()",
    Session.list_tools: "()",
    Session.search_tools: "(query, limit=10)",
    Session.list_workflows: "()",
    Session.search_workflows: "(query, limit=5)",
    Session.get_workflow: "(name)",
    Session.add_workflow: "(name, source, description)",
    Session.remove_workflow: "(name)",
    Session.list_artifacts: "()",
    Session.save_artifact: "(name, data, description='', metadata=None)",
    Session.load_artifact: "(name)",
    Session.delete_artifact: "(name)",
    Session.list_deps: "()",
    Session.add_dep: "(package)",
    Session.remove_dep: "(package)",
    Session.sync_deps: "()",
    FileStorage: "(base_path)",
    FileStorage.get_skill_library: "()",  # and get_workflow_library
    FileStorage.get_artifact_store: "()",
    FileStorage.open: "()",
    RedisStorage: "(url=None, redis=None, prefix='py_code_mode')",
    RedisStorage.get_skill_library: "()",
    RedisStorage.get_artifact_store: "()",
    RedisStorage.open: "()",
    SkillLibrary.list: "()",
    SkillLibrary.search: "(query, limit=10)",
    SkillLibrary.get: "(name)",
    SkillLibrary.add: "(skill)",
    SkillLibrary.remove: "(name)",
    SkillLibrary.refresh: "()",
    FileArtifactStore.save: "(name, data, description='', metadata=None)",
    FileArtifactStore.load: "(name)",
    FileArtifactStore.get: "(name)",
    FileArtifactStore.exists: "(name)",
    FileArtifactStore.delete: "(name)",
    FileArtifactStore.list: "()",
    Capability.all: "()",
    ToolCallable.signature: "()",
    Tool.signatures: "()",
    Tool.to_dict: "()",
    ExecutionResult: "(value, stdout, error, execution_time_ms=None, backend_info=<factory>)",
    JsonSchema: (
        "(type='object', description=None, properties=<factory>, required=<factory>, items=None, enum=<factory>, "
        "default=None, additional_properties=True)"
    ),
    JsonSchema.to_dict: "()",
    JsonSchema.from_dict: "(data)",
    ToolDefinition: (
        "(name, description, input_schema, output_schema=None, tags=frozenset(), python_deps=(), timeout_seconds=60.0)"
    ),
    ToolDefinition.matches_scope: "(scope)",
    SubprocessExecutor: "(config=None)",
    InProcessExecutor: "(*, default_timeout=30.0, config=None)",
    ContainerExecutor: "(config)",
    PythonSkill.from_source: "(name, source, description='', metadata=None)",
    PythonSkill.invoke: "(**kwargs)",
    **{getattr(kind, name): wanted for kind in (Executor, SubprocessExecutor) for name, wanted in EXECUTOR.items()},
}


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_signatures(function: Any, wanted: str) -> None:
    assert plain_signature(function) == wanted


def test_every_signature_is_checked() -> None:
    """What programs import and call; the modules and classes have nothing else that is public."""
    shown = (Session, FileStorage, RedisStorage, SkillLibrary, PythonSkill, FileArtifactStore, RedisArtifactStore)
    assert unchecked(SIGNATURES, *shown, Capability, Tool, ToolCallable, JsonSchema, ToolDefinition, Executor) == []
    for kind in (InProcessExecutor, SubprocessExecutor, ContainerExecutor):
        assert unchecked(SIGNATURES, kind, *kind.__bases__) == []
    assert FileStorage.get_workflow_library is FileStorage.get_skill_library
    assert RedisStorage.get_workflow_library is RedisStorage.get_skill_library


def test_which_calls_are_awaited() -> None:
    plain = {"supports", "supported_capabilities", "from_base", "inprocess", "subprocess"}
    for name, member in inspect.getmembers(Session, callable):
        if not name.startswith("_"):
            assert inspect.iscoroutinefunction(member) is (name not in plain), name
    assert isinstance(Session.storage, property)
    for skill, workflow in (
        ("list_skills", "list_workflows"),
        ("search_skills", "search_workflows"),
        ("get_skill", "get_workflow"),
        ("add_skill", "add_workflow"),
        ("remove_skill", "remove_workflow"),
    ):
        assert getattr(Session, skill) is getattr(Session, workflow)


# --- results, settings -----------------------------------------------------------------------------------------------


def test_the_result_of_a_run() -> None:
    result = ExecutionResult(1, "out", None)
    assert (result.value, result.stdout, result.error, result.execution_time_ms, result.backend_info) == (
        1,
        "out",
        None,
        None,
        {},
    )
    assert result.is_ok
    assert not ExecutionResult(None, "", "wrong").is_ok


COMMON = {"allow_runtime_deps": True, "tools_path": None, "deps": None, "deps_file": None}
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
SETTINGS: dict[type, dict[str, Any]] = {
    InProcessConfig: {"default_timeout": 30.0, "ipc_timeout": 30.0},
    SubprocessConfig: {
        "python_version": RUNNING,
        "venv_path": None,
        "base_deps": ("ipykernel",),
        "startup_timeout": 30.0,
        "default_timeout": 60.0,
        "cleanup_venv_on_close": None,
        "cache_venv": True,
        "ipc_timeout": None,
    },
    ContainerConfig: {
        "image": "py-code-mode-tools:latest",
        "auto_build": True,
        "port": 0,
        "host": "localhost",
        "timeout": 30.0,
        "startup_timeout": 60.0,
        "health_check_interval": 0.5,
        "ipc_timeout": 30.0,
        "environment": {},
        "remove_on_exit": True,
        "name": None,
        "auth_token": None,
        "auth_disabled": False,
        "remote_url": None,
    },
}


@pytest.mark.parametrize("config", SETTINGS)
def test_the_fields_of_settings(config: Any) -> None:
    assert dataclasses.asdict(config()) == COMMON | SETTINGS[config]
    if config is not ContainerConfig:
        with pytest.raises(dataclasses.FrozenInstanceError):
            config().deps = ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"python_version": "3"},
        {"python_version": "new"},
        {"default_timeout": 0},
        {"startup_timeout": -1},
        {"ipc_timeout": 0},
    ],
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SubprocessConfig(**wrong)


def test_capabilities() -> None:
    names = {name for name in vars(Capability) if name.isupper()}
    assert {name: getattr(Capability, name) for name in names} == {name: name.lower() for name in names}
    assert Capability.all() == {
        "timeout",
        "process_isolation",
        "network_isolation",
        "network_filtering",
        "filesystem_isolation",
        "memory_limit",
        "cpu_limit",
        "reset",
        "deps_install",
        "deps_uninstall",
    }


def test_what_is_no_storage_or_executor(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Session(None)  # type: ignore[arg-type]
    for wrong in ("subprocess", 5, object()):
        with pytest.raises(TypeError, match="SubprocessExecutor"):
            Session(FileStorage(tmp_path), wrong)  # type: ignore[arg-type]
    for executor in (InProcessExecutor(), SubprocessExecutor(), ContainerExecutor(ContainerConfig())):
        assert isinstance(executor, Executor)
    assert isinstance(FileStorage(tmp_path), StorageBackend)
    assert Session(storage=FileStorage(tmp_path)).storage.root == tmp_path  # type: ignore[attr-defined]


async def test_an_executor_of_the_program_itself(tmp_path: Path) -> None:
    """It runs code; skills and artifacts need a session of carrel."""

    async def run(self: Any, code: str, timeout: float | None = None) -> ExecutionResult:
        return ExecutionResult(f"ran {code}", "", None)

    async def nothing(self: Any, *_: Any) -> None:
        return None

    own = type("Own", (), {**dict.fromkeys(EXECUTOR, nothing), "run": run})()
    async with Session(FileStorage(tmp_path), own) as session:
        assert (await session.run("1")).value == "ran 1"
        with pytest.raises(TypeError, match="Own"):
            await session.list_skills()


def test_configured_deps(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# comment\nsix>=1\n\n")
    executor = SubprocessExecutor(SubprocessConfig(deps=("a",), deps_file=file))
    assert executor.get_configured_deps() == ["a", "six>=1"]
    assert InProcessExecutor(default_timeout=5).config.default_timeout == 5
    assert InProcessExecutor(config=InProcessConfig(default_timeout=7), default_timeout=5).config.default_timeout == 7


# --- sessions --------------------------------------------------------------------------------------------------------


def test_the_folder_is_made(tmp_path: Path) -> None:
    for name, make in (("a", Session.from_base), ("b", Session.inprocess), ("c", Session.subprocess)):
        make(tmp_path / "new" / name)
        assert (tmp_path / "new" / name / "tools").is_dir()


def test_both_names_of_the_folder(tmp_path: Path) -> None:
    for made in (Session.from_base(base=tmp_path), Session.from_base(base_path=tmp_path)):  # type: ignore[call-arg]
        assert isinstance(made, Session)
        assert made.storage.root == tmp_path  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        Session.from_base()  # type: ignore[call-arg]


async def test_what_differs_on_purpose(base: Path) -> None:
    for made in (Session(FileStorage(base)), Session.from_base(base)):
        async with made as session:
            assert session.supports("process_isolation")  # not in this process
    async with Session.inprocess(base) as session:
        assert isinstance((await session.run("object()")).value, str)
        for data in (5, None, True, "{}"):
            await session.save_artifact("a.json", data)
            assert await session.load_artifact("a.json") == data


@pytest.mark.parametrize("make", [Session.from_base, Session.inprocess, Session.subprocess])
async def test_running_code(make: Any, base: Path) -> None:
    session = make(base)
    assert session.supported_capabilities() == set()
    assert not session.supports("timeout")
    async with session:
        first = await session.run("import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
        assert isinstance(first, ExecutionResult)
        assert (first.value, first.error, first.is_ok) == (21, None, True)
        assert first.stdout == ("out\n" if make == Session.inprocess else "out\nerr\n")
        assert first.execution_time_ms is not None
        assert (await session.run("x")).value == 20
        wrong = await session.run("1/0")
        assert not wrong.is_ok
        assert "ZeroDivisionError" in str(wrong.error)
        late = await session.run("while True: pass", timeout=0.3)
        assert ("timeout" if make == Session.inprocess else "timed out") in str(late.error)
        assert (await session.run("x")).value == 20
        wanted = {"timeout", "reset", "deps_install", "deps_uninstall"}
        if make != Session.inprocess:
            wanted.add("process_isolation")
        assert wanted <= session.supported_capabilities()
        assert session.supports(capability="timeout")
        assert session.supports("process_isolation") is (make != Session.inprocess)
        assert not session.supports("container_isolation")
        await session.reset()
        assert "NameError" in str((await session.run("x")).error)
    assert session.supported_capabilities() == set()
    assert (await session.run("1")).error == "Session is closed"
    await session.close()


async def test_values_that_are_no_data(base: Path) -> None:
    async with Session.inprocess(base) as session:
        assert "object" in str((await session.run("object()")).value)
    async with Session.subprocess(base) as session:
        assert "object" in (await session.run("object()")).value
        assert (await session.run("{'a': [1, (2,)]}")).value == {"a": [1, (2,)]}


async def test_an_executor_by_itself(base: Path) -> None:
    executor = SubprocessExecutor(config=SubprocessConfig(default_timeout=20.0))
    await executor.start(storage=FileStorage(base_path=base))
    try:
        assert (await executor.run("1 + 1")).value == 2
        assert [tool["name"] for tool in await executor.list_tools()] == ["echo"]
    finally:
        await executor.close()
    with pytest.raises(RuntimeError, match="start"):
        await SubprocessExecutor().run("1")
    executor = SubprocessExecutor()
    await executor.start()  # without a storage
    assert (await executor.run("tools.list()")).value == []
    await executor.close()


async def test_a_container(base: Path, docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    config = ContainerConfig(image=IMAGE, timeout=60.0, environment={"WORD": "inside"})
    async with Session(FileStorage(base), ContainerExecutor(config)) as session:
        assert await value(session, "import os\nos.environ['WORD']") == "inside"
        assert await value(session, "skills.double(n=2)") == 4
        assert session.supports("process_isolation")
        assert session.supports("container_isolation")


async def test_packages_of_an_executor(base: Path) -> None:
    (base / "mine.txt").write_text("# mine\nPackaging>=20\n")
    executor = SubprocessExecutor(SubprocessConfig(deps=("typing_extensions",), deps_file=base / "mine.txt"))
    await executor.start(FileStorage(base))
    try:
        assert (await executor.uninstall_deps(["none-of-these", "nor-these"]))["not_found"] == [
            "none-of-these",
            "nor-these",
        ]
        assert await executor.list_deps() == ["typing-extensions", "packaging>=20"]
        report = await executor.install_deps(["typing_extensions"])
        assert [name.replace("_", "-") for name in report["already_present"]] == ["typing-extensions"]
        assert await executor.list_deps() == ["typing-extensions", "packaging>=20"]
    finally:
        await executor.close()


async def test_tools_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "echo.yaml").write_text(ECHO)
    executor = SubprocessExecutor(config=SubprocessConfig(tools_path=tmp_path / "mine"))
    async with Session(storage=FileStorage(base_path=tmp_path / "base"), executor=executor) as session:
        assert await value(session, "tools.echo.say(text='hi')") == "hi\n"


# --- tools -----------------------------------------------------------------------------------------------------------

SAY = {
    "name": "say",
    "description": "Print it",
    "parameters": [{"name": "text", "type": "str", "required": True, "default": None, "description": "What to print"}],
}


async def test_tools(session: Session) -> None:
    [tool] = await session.list_tools()
    assert list(tool) == ["name", "description", "tags", "callables"]
    assert (tool["name"], tool["description"], tool["tags"]) == ("echo", "Print words", ["text"])
    assert sorted(each["name"] for each in tool["callables"]) == ["echo", "say"]
    assert SAY in tool["callables"]
    [found] = await session.search_tools("print words")
    assert list(found) == list(tool)
    assert sorted(found["callables"], key=str) == sorted(tool["callables"], key=str)
    assert len(await session.search_tools("print", limit=1)) == 1
    assert list(tool["callables"][0]["parameters"][0]) == ["name", "type", "required", "default", "description"]


async def test_tools_inside(session: Session) -> None:
    assert await value(session, "t = tools.list()[0]\n[t.name, t['name'], t.tags, sorted(t)[0]]") == [
        "echo",
        "echo",
        ["text"],
        "callables",
    ]
    assert await value(session, "[c.name for c in tools.search('print', limit=5)[0].callables]")
    assert SAY in await value(session, "tools.list()[0].callables")
    assert sorted(await value(session, "[(r.name, r['description']) for r in tools.echo.list()]")) == [
        ("echo", "Print"),
        ("say", "Print it"),
    ]
    assert await value(session, "tools.echo.say(text='a')") == "a\n"
    assert await value(session, "tools.echo(text='b', n=True)") == "b"
    assert await value(session, "tools.echo.echo()") == "hi\n"
    assert await value(session, "tools.echo()") == "hi\n"  # the recipe of this name
    assert await value(session, "tools.echo.say.call_sync(text='c')") == "c\n"
    assert await value(session, "await tools.echo.say.call_async(text='d')") == "d\n"
    assert await value(session, "await tools.echo.call_async(text='e')") == "e\n"
    for code in ("tools.none", "tools.echo.none", "skills.none()"):
        caught = f"try:\n    {code}\nexcept AttributeError as problem:\n    found = str(problem)\nfound"
        assert "none" in await value(session, caught)
    caught = "try:\n    skills.invoke('none')\nexcept ValueError as problem:\n    found = 'ValueError'\nfound"
    assert await value(session, caught) == "ValueError"


async def test_an_mcp_or_python_tool_is_its_own_callable(base: Path) -> None:
    (base / "tools" / "stats.yaml").write_text("name: stats\ntype: python\nmodule: statistics\n")
    async with Session.from_base(base) as session:
        tools = {tool["name"]: tool for tool in await session.list_tools()}
        assert list(tools) == ["echo", "stats"]
        assert "mean" in [each["name"] for each in tools["stats"]["callables"]]


async def test_the_types_of_a_tool_are_the_words_of_its_file(base: Path) -> None:
    words = ["integer", "number", "boolean", "array"]
    options = "".join(f"    {word}: {{type: {word}}}\n" for word in words)
    text = "    - {name: text, type: string}\n    - {name: plain}\n"
    (base / "tools" / "typed.yaml").write_text(
        f"name: typed\ncommand: echo\nschema:\n  options:\n{options}  positional:\n{text}"
    )
    async with Session.from_base(base) as session:
        [itself] = (await session.search_tools("typed", limit=1))[0]["callables"]
        assert itself["name"] == "typed"  # has no recipes
        found = {each["name"]: each["type"] for each in itself["parameters"]}
        assert found == {**{word: word for word in words}, "text": "str", "plain": "str"}


def test_tools_as_objects() -> None:
    parameter = ToolParameter("text", "str", required=True)
    tool = Tool("echo", "Print", [ToolCallable("say", "Print it", [parameter, ToolParameter("n", "int", default=1)])])
    assert tool.signatures() == ["say(text: str, n: int = 1)"]
    assert tool.to_dict()["callables"][0]["parameters"][0]["name"] == "text"
    assert tool.tags == []


# --- workflows, artifacts --------------------------------------------------------------------------------------------


async def test_workflows(session: Session) -> None:
    [double] = await session.list_skills()
    assert list(double) == ["name", "description", "parameters"]
    assert double["description"] == "Multiply a number."
    assert [sorted(each) for each in double["parameters"]] == [sorted(PARAMETER_KEYS)] * 8
    assert {each["name"]: each["type"] for each in double["parameters"]} == {
        "n": "integer",
        "factor": "number",
        "flag": "boolean",
        "names": "array",
        "some": "string",
        "more": "object",
        "label": "string",
        "text": "string",
    }
    first = double["parameters"][0]
    assert (first["required"], first["default"], first["description"]) == (True, None, "")
    added = await session.add_workflow("greet", "def run(name):\n    return f'hi {name}'\n", "Greet")
    assert added == await session.get_workflow("greet")
    assert added["source"].startswith("def run")
    assert [each["name"] for each in await session.search_workflows("greet a person", limit=1)] == ["greet"]
    assert [each["name"] for each in await session.list_workflows()] == ["double", "greet"]
    assert await session.get_workflow("none") is None
    assert await session.remove_workflow("greet") is True
    assert await session.remove_workflow("greet") is False
    for name in ("no name", "list", "search", "get", "invoke", "create", "delete"):
        with pytest.raises(ValueError, match=name):
            await session.add_workflow(name, "def run(): pass", "")
    with pytest.raises(errors.SkillValidationError, match="run"):
        await session.add_workflow("x", "def other(): pass", "")
    with pytest.raises(SyntaxError):
        await session.add_workflow("x", "def run(:", "")


async def test_workflows_inside(session: Session) -> None:
    assert await value(session, "skills.double(n=4)") == 8
    assert await value(session, "workflows.invoke('double', n=4, factor=3)") == 12
    assert await value(session, "skills is workflows")
    assert await value(session, "skills.list()[0].params['n']") == "integer"
    assert await value(session, "skills.get('double').parameters[0].type") == "integer"
    assert await value(session, "skills.search('multiply', limit=1)[0]['params']['factor']") == "number"
    assert await value(session, "skills.create('one', 'def run():\\n    return 1', description='One').name") == "one"
    assert await value(session, "[skills.one(), skills.get('one').source, skills.get('none')]") == [
        1,
        "def run():\n    return 1",
        None,
    ]
    assert await value(session, "[skills.delete('one'), skills.delete('one')]") == [True, False]


async def test_artifacts(session: Session, base: Path) -> None:
    saved = await session.save_artifact("b/data.json", {"a": [1]}, "Data", {"k": "v"})
    assert list(saved) == ["name", "path", "description", "metadata", "created_at"]
    assert saved["path"] == str(base / "artifacts" / "b" / "data.json")
    assert (saved["description"], saved["metadata"]) == ("Data", {"k": "v"})
    assert datetime.fromisoformat(saved["created_at"]).tzinfo is not None
    await session.save_artifact("a.txt", "text")
    await session.save_artifact("raw", b"\x00\xff")
    await session.save_artifact("list", [1, {"a": None}])
    assert await session.load_artifact("list") == [1, {"a": None}]
    await session.delete_artifact("list")
    await session.save_artifact("b/data.json", {"a": [2]}, "Data", {"k": "v"})
    assert [each["name"] for each in await session.list_artifacts()] == ["b/data.json", "a.txt", "raw"]
    assert await session.load_artifact("b/data.json") == {"a": [2]}
    assert await session.load_artifact("a.txt") == "text"
    assert await session.load_artifact("raw") == b"\x00\xff"
    with pytest.raises(errors.ArtifactNotFoundError) as caught:
        await session.load_artifact("none")
    assert caught.value.artifact_name == "none"
    await session.delete_artifact("raw")
    await session.delete_artifact("raw")
    for outside in ("../x", "/x", "a/../../x"):
        with pytest.raises(ValueError, match=r"(?i)path traversal"):
            await session.save_artifact(outside, "x")


async def test_artifacts_inside(session: Session) -> None:
    assert await value(session, "artifacts.save('x', {'a': 1}, description='d').name") == "x"
    assert await value(
        session, "[artifacts.list()[0].description, artifacts.get('x').name, artifacts.get('none')]"
    ) == [
        "d",
        "x",
        None,
    ]
    assert await value(session, "[artifacts.load('x'), artifacts.exists('x'), artifacts.delete('x')]") == [
        {"a": 1},
        True,
        None,
    ]
    assert await session.list_artifacts() == []


async def test_the_folder_of_the_artifacts_in_this_process(base: Path) -> None:
    async with Session.inprocess(base) as session:
        read = "artifacts.save('x.txt', 'text')\nfrom pathlib import Path\nPath(artifacts.path, 'x.txt').read_text()"
        assert await value(session, read) == "text"
        assert await value(session, "artifacts.path") == FileStorage(base).get_artifact_store().path
        assert await value(session, "artifacts.load('x.txt')") == "text"


async def test_a_folder_of_the_original_is_read(base: Path) -> None:
    (base / "artifacts").mkdir()
    (base / "artifacts" / "report.txt").write_text("of the original")
    (base / "artifacts" / "other.txt").write_text("without an entry")
    entry = {"description": "Old", "created_at": "2020-01-01T00:00:00+00:00", "metadata": {"k": 1}}
    (base / "artifacts" / ".artifacts.json").write_text(json.dumps({"report.txt": entry}))
    (base / "deps").mkdir()
    (base / "deps" / "requirements.txt").write_text("typing_extensions>=4\n")
    async with Session.from_base(base) as session:
        first, second = await session.list_artifacts()
        assert {name: first[name] for name in entry} == entry
        assert (first["name"], second["name"]) == ("report.txt", "other.txt")
        assert await session.load_artifact("report.txt") == "of the original"
        await session.save_artifact("report.txt", "new", "New")
        assert [each["description"] for each in await session.list_artifacts()] == ["", "New"]
        assert await session.list_deps() == ["typing-extensions>=4"]
    assert FileStorage(base).get_artifact_store().list()[0].name == "other.txt"


# --- libraries and stores --------------------------------------------------------------------------------------------


async def test_the_library_of_a_storage(base: Path) -> None:
    """Plain calls, while a loop runs in this thread."""
    storage = FileStorage(base)
    assert storage.root == base
    library = storage.get_skill_library()
    assert [skill.name for skill in library.list()] == ["double"]
    skill = library.get("double")
    assert skill is not None
    assert skill.source == DOUBLE
    assert (skill.parameters[0].name, skill.parameters[0].type, skill.parameters[0].required) == ("n", "integer", True)
    assert library.get("none") is None
    greet = PythonSkill.from_source("greet", "async def run(name: str):\n    return 'hi ' + name\n", "Greet")
    assert await greet.invoke(name="Ada") == "hi Ada"
    library.add(greet)
    library.refresh()
    assert len(library) == 2
    assert [skill.name for skill in library.search("greet", limit=1)] == ["greet"]
    assert storage.get_workflow_library().get("greet") == greet
    async with Session(storage) as session:
        assert await value(session, "skills.greet(name='Bob')") == "hi Bob"
    assert library.remove("greet") is True
    assert library.remove("greet") is False
    with pytest.raises(errors.SkillValidationError, match="run") as refused:
        PythonSkill.from_source("x", "y = 1")
    assert isinstance(refused.value, ValueError)
    assert refused.value.skill_name == "x"
    with pytest.raises(errors.SkillExecutionError) as caught:
        await PythonSkill.from_source("fails", "def run():\n    return 1 / 0").invoke()
    assert caught.value.skill_name == "fails"


async def test_the_artifact_store_of_a_storage(base: Path) -> None:
    store = FileStorage(base).get_artifact_store()
    saved = store.save("a.txt", "text", "Text", {"k": 1})
    assert (saved.name, saved.path, saved.description, saved.metadata) == (
        "a.txt",
        str(base / "artifacts" / "a.txt"),
        "Text",
        {"k": 1},
    )
    assert saved.created_at is not None
    assert saved.created_at.tzinfo is not None
    assert store.path == str(base / "artifacts")
    assert store.get("a.txt") == saved
    assert store.list() == [saved]
    assert store.load("a.txt") == "text"
    assert store.exists("a.txt")
    assert store.get("none") is None
    with pytest.raises(errors.ArtifactNotFoundError):
        store.load("none")
    with pytest.raises(ValueError, match="path traversal"):
        store.save("../x", "y")
    store.delete("a.txt")
    store.delete("a.txt")
    assert not store.exists("a.txt")


async def test_redis(redis_url: str) -> None:
    wrong_arguments: list[dict[str, Any]] = [{}, {"url": "redis://x", "redis": object()}]
    for wrong in wrong_arguments:
        with pytest.raises(ValueError, match="redis client"):
            RedisStorage(**wrong)
    storage = RedisStorage(redis_url, prefix="mine")
    assert storage.prefix == "mine"
    assert storage.client.ping()
    storage.client.close()
    async with Session(storage) as session:
        await session.add_workflow("one", "def run():\n    return 1\n", "One")
        assert await value(session, "skills.one()") == 1
        await session.save_artifact("a", "text")
    assert [skill.name for skill in storage.get_skill_library().list()] == ["one"]
    assert storage.get_artifact_store().load("a") == "text"
    async with Session(storage, InProcessExecutor()) as session:
        assert await value(session, "artifacts.path") == storage.get_artifact_store().path

    client = Redis.from_url(redis_url)
    other = RedisStorage(redis=client, prefix="mine")
    assert other.client is client
    client.close()
    assert other.get_artifact_store().exists("a")


# --- packages --------------------------------------------------------------------------------------------------------


async def test_deps(base: Path) -> None:
    async with Session.from_base(base, extra_deps=["Typing_Extensions>=4", "typing-extensions"]) as session:
        assert await session.list_deps() == ["typing-extensions>=4"]
        report = await session.sync_deps()
        assert set(report) >= {"installed", "already_present", "failed"}
        removed = await session.remove_dep("none-of-these")
        assert removed["not_found"] == ["none-of-these"]
        assert removed["removed_from_config"] is False
        assert set(removed) >= {"removed", "not_found", "failed", "removed_from_config"}
        assert await value(session, "deps.list()") != []
        assert "already_present" in await value(session, "deps.sync()")
        assert await value(session, "deps.add('typing_extensions').failed") == []
        assert await value(session, "deps.sync().failed") == []
        assert await value(session, "deps.remove('none-of-these')") is False


@pytest.mark.parametrize("package", ["", "  ", "x" * 257, "a\nb", *(f"a{sign}b" for sign in "@;()|&`$")])
async def test_wrong_packages(session: Session, package: str) -> None:
    with pytest.raises(ValueError, match="package"):
        await session.add_dep(package)
    with pytest.raises(ValueError, match="package"):
        await session.remove_dep(package)


async def test_packages_that_may_not_change(base: Path) -> None:
    async with Session.from_base(base, allow_runtime_deps=False) as session:
        for call in (session.add_dep, session.remove_dep):
            with pytest.raises(RuntimeDepsDisabledError) as caught:
                await call("six")
            assert isinstance(caught.value, RuntimeError)
            assert not isinstance(caught.value, errors.CodeModeError)
        assert await session.list_deps() == []
        await session.sync_deps()
    assert SyncResult().installed == set()


# --- errors ----------------------------------------------------------------------------------------------------------

CAUSE = RuntimeError("why")
ERRORS: list[tuple[type, tuple[Any, ...], dict[str, Any], type]] = [
    (errors.ToolNotFoundError, ("t", ["a"]), {"tool_name": "t", "available_tools": ["a"]}, errors.CodeModeError),
    (errors.ToolNotFoundError, ("t",), {"available_tools": []}, carrel_errors.ToolNotFoundError),
    (
        errors.ToolCallError,
        ("t", {"a": 1}, CAUSE),
        {"tool_name": "t", "tool_args": {"a": 1}, "cause": CAUSE},
        carrel_errors.ToolCallError,
    ),
    (errors.ToolTimeoutError, ("t", 5.0), {"tool_name": "t", "timeout_seconds": 5.0}, carrel_errors.ToolTimeoutError),
    (errors.ArtifactNotFoundError, ("a",), {"artifact_name": "a"}, carrel_errors.ArtifactNotFoundError),
    (errors.ArtifactWriteError, ("a", "r"), {"artifact_name": "a", "reason": "r"}, carrel_errors.ArtifactWriteError),
    (errors.SkillNotFoundError, ("s",), {"skill_name": "s"}, carrel_errors.WorkflowNotFoundError),
    (errors.SkillValidationError, ("s", "r"), {"skill_name": "s", "reason": "r"}, ValueError),
    (errors.SkillExecutionError, ("s", CAUSE), {"skill_name": "s", "cause": CAUSE}, RuntimeError),
    (errors.DependencyError, ("p", "q"), {"package": "p", "required_by": "q"}, carrel_errors.DependencyError),
    (errors.DependencyError, ("p",), {"required_by": None}, errors.CodeModeError),
    (errors.ConfigurationError, ("m",), {}, carrel_errors.ConfigurationError),
    (errors.StorageError, ("m",), {}, errors.CodeModeError),
    (errors.StorageReadError, ("m", "/p"), {"path": "/p"}, errors.StorageError),
    (errors.StorageWriteError, ("m",), {"path": None}, errors.StorageError),
    (errors.RPCError, ("m",), {}, errors.CodeModeError),
    (errors.RPCTransportError, ("m",), {}, errors.RPCError),
    (
        errors.NamespaceError,
        ("tools", "call", "m"),
        {"namespace": "tools", "operation": "call", "original_type": "RuntimeError"},
        errors.RPCError,
    ),
    (
        errors.SkillError,
        ("get", "m", "KeyError"),
        {"namespace": "skills", "original_type": "KeyError"},
        errors.NamespaceError,
    ),
    (errors.ToolError, ("call", "m"), {"namespace": "tools", "operation": "call"}, errors.NamespaceError),
    (errors.ArtifactError, ("load", "m"), {"namespace": "artifacts"}, errors.NamespaceError),
    (errors.DepsError, ("add", "m"), {"namespace": "deps"}, errors.NamespaceError),
]


@pytest.mark.parametrize(("error_class", "arguments", "attributes", "parent"), ERRORS)
def test_errors(error_class: type, arguments: tuple[Any, ...], attributes: dict[str, Any], parent: type) -> None:
    error = error_class(*arguments)
    assert isinstance(error, parent)
    assert isinstance(error, errors.CodeModeError)
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert str(error)
    assert not hasattr(error, "message")


# --- errors of the namespaces in the running code ---------------------------------------------------------------------

CATCH = """
def caught(call, expected):
    try:
        call()
    except expected as e:
        return [type(e).__name__, e.namespace, e.operation, e.original_type, str(e) != ""]
"""
WRONG = "def run(n):\n    return {}[n]\n"
FAILURES = [
    ("tools.none", "ToolError", "tools", "call", "ToolNotFoundError"),
    ("tools.echo.say(wrong=1)", "ToolError", "tools", "call", None),
    ("skills.none()", "SkillError", "skills", "invoke", None),
    ("skills.invoke('none')", "SkillError", "skills", "invoke", None),
    ("skills.create('x', 'y = 1', 'd')", "SkillError", "skills", "create", None),
    ("workflows.wrong(n=1)", "SkillError", "skills", "invoke", "KeyError"),
    ("artifacts.load('none')", "ArtifactError", "artifacts", "load", "ArtifactNotFoundError"),
    ("artifacts.save('../x', 1)", "ArtifactError", "artifacts", "save", None),
    ("deps.add('')", "DepsError", "deps", "add", None),
]


@pytest.mark.parametrize(("call", "error", "namespace", "operation", "original"), FAILURES)
async def test_failures_of_the_namespaces(
    base: Path, call: str, error: str, namespace: str, operation: str, original: str | None
) -> None:
    (base / "skills" / "wrong.py").write_text(WRONG)
    async with Session.from_base(base) as session:
        for expected in (error, "NamespaceError", "RPCError"):
            found = await value(session, f"{CATCH}\ncaught(lambda: {call}, {expected})")
            assert found is not None, f"{call} did not raise {expected}"
            assert found == [error, namespace, operation, original or found[3], True]
        result = await session.run(call)
        assert str(result.error).splitlines()[-1].removeprefix("carrel.").startswith(error)
        others = {"ToolError", "SkillError", "ArtifactError", "DepsError", "RPCTransportError"} - {error}
        assert (await session.run(f"{CATCH}\ncaught(lambda: {call}, ({', '.join(sorted(others))}))")).error is not None


async def test_failures_are_the_builtin_errors_too(base: Path) -> None:
    (base / "skills" / "wrong.py").write_text(WRONG)
    (base / "skills" / "inner.py").write_text("def run():\n    return tools.none()\n")
    async with Session.subprocess(base) as session:
        for call, builtin in (
            ("tools.none", "AttributeError"),
            ("skills.invoke('none')", "ValueError"),
            ("artifacts.load('none')", "FileNotFoundError"),
            ("skills.wrong(n=1)", "KeyError"),
            ("skills.inner()", "ToolError"),  # and a SkillError
        ):
            assert await value(session, f"{CATCH}\ncaught(lambda: {call}, {builtin})"), call
        assert (
            await value(session, "try:\n    skills.wrong(n=1)\nexcept SkillError as e:\n    found = str(e)\nfound")
            == "KeyError: 1"
        )
        # An error that cannot be made with a message alone is one of the namespace only.
        await session.add_skill("decode", "def run():\n    return b'\\xff'.decode()\n", "")
        assert (await value(session, f"{CATCH}\ncaught(skills.decode, SkillError)"))[3] == "UnicodeDecodeError"
        assert await value(session, "hasattr(tools, 'none')") is False
        awaited = "try:\n    await skills.wrong.call_async(n=1)\nexcept SkillError as e:\n    found = e.original_type"
        assert await value(session, f"{awaited}\nfound") == "KeyError"
        # A failure of other code is none of a namespace.
        assert "ZeroDivisionError" in str((await session.run("try:\n    1/0\nexcept RPCError:\n    pass")).error)


FAMILY = ["RPCError", "RPCTransportError", "NamespaceError", "SkillError", "ToolError", "ArtifactError", "DepsError"]


async def test_the_rpc_errors_are_names_of_the_running_code(base: Path) -> None:
    same = f"""
[issubclass(RPCTransportError, RPCError), issubclass(NamespaceError, RPCError),
 [each.__name__ for each in ({", ".join(FAMILY[3:])}) if issubclass(each, NamespaceError)]]
"""
    check = f"{CATCH}\ncaught(lambda: tools.none, ToolError)[1:3]"
    executor = SubprocessExecutor()
    async with Session(FileStorage(base), executor) as session:
        assert executor.session is not None
        assert await value(session, same) == [True, True, FAMILY[3:]]
        assert await executor.session.variables() == []
        assert await value(session, check) == ["tools", "call"]
        await session.reset()
        assert await value(session, check) == ["tools", "call"]
        await session.run("del caught\nToolError = 1")
        await session.reset()
        assert await value(session, check) == ["tools", "call"]
        async with await executor.session.fork() as fork:
            assert (await fork.run(check)).value == ["tools", "call"]
            assert (await fork.run("tools.list()[0].callables")).error is None
            # A new worker of the fork, because the first one is killed.
            assert (await fork.run("import os\nos.kill(os.getpid(), 9)")).error is not None
            assert (await fork.run(check)).value == ["tools", "call"]
            assert [each.name for each in await fork.variables() if each.name in FAMILY] == []
        checkpoint = await executor.session.checkpoint()
        await executor.session.rewind(checkpoint)
        assert await value(session, check) == ["tools", "call"]


async def test_code_in_this_process_gets_the_errors_themselves(base: Path) -> None:
    async with Session.inprocess(base) as session:
        assert "NameError" in str((await session.run("ToolError")).error)
        caught = "try:\n    artifacts.load('none')\nexcept FileNotFoundError as e:\n    found = type(e).__name__\nfound"
        assert await value(session, caught) == "ArtifactNotFoundError"


# --- small objects ---------------------------------------------------------------------------------------------------


def test_schemas() -> None:
    data = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string", "enum": ["x"]}}},
        "required": ["a"],
        "additionalProperties": False,
    }
    schema = JsonSchema.from_dict(data)
    assert schema.properties["a"].items == JsonSchema(type="string", enum=["x"])
    assert schema.to_dict() == data
    assert JsonSchema().to_dict() == {"type": "object"}
    tool = ToolDefinition("t", "d", JsonSchema(), tags=frozenset({"web"}))
    assert (tool.output_schema, tool.python_deps, tool.timeout_seconds) == (None, (), 60.0)
    assert tool.matches_scope({"web", "other"})
    assert not tool.matches_scope({"other"})
    assert tool.matches_scope(set())


# --- the example program ---------------------------------------------------------------------------------------------


def test_the_example_program(base: Path) -> None:
    async def main() -> list[Any]:
        storage = FileStorage(base_path=base)
        executor = SubprocessExecutor(config=SubprocessConfig(tools_path=base / "tools"))
        async with Session(storage=storage, executor=executor) as session:
            source = "async def run(word: str) -> str:\n    return tools.echo.say(text=word).strip() * 2\n"
            await session.add_skill("twice", source, "Say a word twice")
            first = await session.run("word = 'ab'\nskills.twice(word=word)")
            second = await session.run("artifacts.save('result', word)\nword.upper()")
            names = [skill["name"] for skill in await session.list_skills()]
            return [first.value, second.value, names, await session.load_artifact("result")]

    assert asyncio.run(main()) == ["abab", "AB", ["double", "twice"], "ab"]
