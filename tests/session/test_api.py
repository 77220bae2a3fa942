"""The signatures of Session that programs rely on: names, order, keywords and defaults."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrel import MemoryStorage, Session, SyncSession
from carrel.session.options import SessionOptions

CONSTRUCTORS = """
__init__(storage, executor=None, sync_deps_on_start=False)
from_base(base, *, timeout=30.0, extra_deps=None, allow_runtime_deps=True, sync_deps_on_start=False)
subprocess(base_path, *, timeout=60.0, extra_deps=None, allow_runtime_deps=True, sync_deps_on_start=False,
    python_version=None, cache_venv=True)
inprocess(base_path, *, timeout=30.0, extra_deps=None, allow_runtime_deps=True, sync_deps_on_start=False)
container(base_path, *, image=None, timeout=60.0)
for_sample(dataset, sample_id, *, datasets=None, ttl_minutes=30)
attach(session_id)
"""
METHODS = """
start()
close()
reset()
verify()
run(code, timeout=None)
interrupt()
set_variables(**variables)
variables()
trace()
execute_command(command, *, timeout=300, cwd=None, env=None, stdin=None, user=None, text=True, on_output=None)
read_file(path)
write_file(path, data)
list_files(path=".")
stat(path)
exists(path)
make_dir(path)
remove(path)
move(path, to)
realpath(path)
processes()
kill(pid)
str_replace(path, old, new)
changed_files()
diff()
fork()
checkpoint(label="")
rewind(to)
drop_checkpoint(point)
list_tools()
search_tools(query, limit=10)
list_workflows()
search_workflows(query, limit=5)
get_workflow(name)
add_workflow(name, source, description)
remove_workflow(name)
list_skills()
search_skills(query, limit=5)
get_skill(name)
add_skill(name, source, description)
remove_skill(name)
list_artifacts()
save_artifact(name, data, description="", metadata=None)
load_artifact(name)
delete_artifact(name)
list_deps()
add_dep(package)
sync_deps()
remove_dep(package)
describe()
call_tool(name, **arguments)
reload_tools()
"""
PLAIN_METHODS = """
stream(code, timeout=None)
supports(capability)
supported_capabilities()
checkpoints()
register_tool(function)
"""
ATTRIBUTES = ["id", "storage", "sample", "workspace_path", "user"]
AT_THE_END = {"keep", "task", "limit"}
"""Optional parameters of our own that can be given by position."""
OPTIONS: dict[str, object] = {
    "session_id": None,
    "persist": None,
    "embedder": None,
    "approve": None,
    "on_error": "raise",
}


def signatures(text: str) -> dict[str, str]:
    """The parameters of each function of a list."""
    lines = text.replace(",\n    ", ", ").splitlines()
    return {line.partition("(")[0]: line.partition("(")[2][:-1] for line in lines if line}


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: each.replace(annotation=each.empty) for name, each in found.items() if name != "self"}


def check(function: Callable[..., Any], wanted: str) -> None:
    """Compare with what is promised. What is added must be optional; a parameter may get a default."""
    promised = parameters_of(eval(f"lambda {wanted}: None"))
    found = parameters_of(function)
    for name, parameter in promised.items():
        assert found[name].kind in (parameter.kind, inspect.Parameter.POSITIONAL_ONLY), name
        assert parameter.default in (found[name].default, parameter.empty), name
    assert [name for name in found if name in promised] == list(promised)
    for name, parameter in found.items():
        optional = parameter.kind == parameter.VAR_KEYWORD or parameter.default is not parameter.empty
        assert name in promised or (optional and parameter.kind >= parameter.KEYWORD_ONLY) or name in AT_THE_END, name


@pytest.mark.parametrize("cls", [Session, SyncSession])
@pytest.mark.parametrize(("name", "wanted"), signatures(CONSTRUCTORS + METHODS + PLAIN_METHODS).items())
def test_signature(cls: type, name: str, wanted: str) -> None:
    check(getattr(cls, name), wanted)


@pytest.mark.parametrize("name", signatures(METHODS))
def test_methods_that_wait_are_coroutines(name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(Session, name))
    assert not inspect.iscoroutinefunction(getattr(SyncSession, name))


@pytest.mark.parametrize("name", signatures(PLAIN_METHODS))
def test_other_methods_are_plain(name: str) -> None:
    assert not inspect.iscoroutinefunction(getattr(Session, name))


def test_every_constructor_takes_the_common_options() -> None:
    parameters = inspect.signature(Session).parameters
    assert {name: parameters[name].default for name in OPTIONS} == OPTIONS
    assert set(OPTIONS) <= set(SessionOptions.__annotations__)
    for name in signatures(CONSTRUCTORS).keys() - {"__init__", "attach"}:
        settings = inspect.signature(getattr(Session, name)).parameters["settings"]
        assert "Options]" in str(settings.annotation)


@pytest.mark.parametrize("name", ATTRIBUTES)
async def test_attributes(name: str) -> None:
    assert hasattr(Session(MemoryStorage()), name)
    assert hasattr(SyncSession(MemoryStorage()), name)


async def test_the_workspace_path_is_the_folder_of_commands(session: Session) -> None:
    await session.start()
    assert session.workspace_path == await session.realpath(".")
    assert (await session.execute_command("pwd")).stdout.strip() == session.workspace_path


async def test_the_workspace_of_a_sandbox_is_known_before_the_start(tmp_path: Path) -> None:
    assert Session.from_base(tmp_path).workspace_path == "/workspace"


async def test_the_workspace_of_a_sample(tmp_path: Path) -> None:
    async with Session.for_sample("demo", "calc-1", cache=tmp_path) as session:
        assert session.sample is not None
        assert session.workspace_path == session.sample.environment.workdir
