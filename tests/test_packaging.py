"""The built wheel, installed from .venv/wheelhouse into empty environments: the core, and each extra by itself."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.missing_parts import skip_without
from tests.support.real_docker import IMAGE
from tests.support.real_postgres import NoPostgres, RealPostgres
from tests.support.wheels import build_wheel

ROOT = Path(__file__).parents[1]
WHEELHOUSE = ROOT / ".venv" / "wheelhouse"
PROJECT_INDEX = ("--offline", "--no-index", "--find-links", str(WHEELHOUSE), "-c", str(ROOT / "constraints.txt"))


@pytest.fixture(scope="session")
def carrel_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any(WHEELHOUSE.glob("*.whl")):
        skip_without("no wheelhouse: run `make dev-venv` where there is a network")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return next(folder.glob("*.whl"))


class Installed:
    """An environment with nothing but carrel and the packages of some extras."""

    def __init__(self, folder: Path, wheel: Path, extras: str, *more: str) -> None:
        self.folder = folder
        uv = [str(ROOT / ".venv" / "bin" / "uv")]
        python = str(folder / "venv" / "bin" / "python")
        for words in (
            ["venv", "-q", "-p", sys.executable, str(folder / "venv")],
            [
                "pip",
                "install",
                "-q",
                "-p",
                python,
                *PROJECT_INDEX,
                f"carrel-sessions[{extras}] @ {wheel.as_uri()}",
                *more,
            ],
        ):
            subprocess.run([*uv, *words], check=True, timeout=120)
        self._python = python
        self._environment = {
            "PATH": f"{folder}/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "HOME": str(folder),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        }

    def run(self, source: str, **environment: str) -> str:
        """Run a program in the environment; return what it prints."""
        run = subprocess.run(
            [self._python, "-c", source],
            cwd=self.folder,
            env=self._environment | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    def packages(self) -> set[str]:
        return {path.name.partition("-")[0] for path in self.folder.glob("venv/lib/*/site-packages/*.dist-info")}

    def megabytes(self) -> float:
        files = self.folder.glob("venv/lib/*/site-packages/**/*")
        return sum(path.stat().st_size for path in files if path.is_file() and path.suffix != ".pyc") / 1e6


Install = Callable[..., Installed]


@pytest.fixture
def install(tmp_path: Path, carrel_wheel: Path) -> Install:
    return lambda extras, *more: Installed(tmp_path, carrel_wheel, extras, *more)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory, carrel_wheel: Path) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("core")
    yield Installed(folder, carrel_wheel, "")
    shutil.rmtree(folder)


def test_the_core_runs_the_ten_lines(core: Installed) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Ten lines") :]
    source, printed = re.findall(r"^```\w+\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[:2]
    assert core.run(source) == printed


def test_the_core_is_small(core: Installed) -> None:
    assert len(core.packages()) <= 32
    assert core.megabytes() < 40


def test_the_core_has_the_commands(core: Installed) -> None:
    source = "import subprocess; print(subprocess.check_output(['carrel', 'run', '6 * 7'], text=True))"
    assert "42" in core.run(source)


MISSING = {
    "redis": "from carrel import RedisStorage; RedisStorage('redis://127.0.0.1:1')",
    "postgres": "from carrel import PostgresStorage; PostgresStorage('postgresql://127.0.0.1:1/x')",
    "server": "import subprocess; print(subprocess.run(['carrel', 'serve'], capture_output=True, text=True).stderr)",
    "mcp": """
import asyncio
from pathlib import Path
from carrel import Session
Path("base/tools").mkdir(parents=True, exist_ok=True)
Path("base/tools/clock.yaml").write_text("name: clock\\ntype: mcp\\ntransport: stdio\\ncommand: clock\\n")
asyncio.run(Session.from_base("base").start())
""",
    "container": """
import asyncio
from carrel import Session
asyncio.run(Session.container("containers").start())
""",
}


@pytest.mark.parametrize("extra", MISSING)
def test_a_missing_extra_is_named(core: Installed, extra: str) -> None:
    source = f"try:\n    exec({MISSING[extra]!r})\nexcept Exception as problem:\n    print(problem)"
    assert f"pip install 'carrel-sessions[{extra}]'" in core.run(source)


SESSION = """
import asyncio
from carrel import MemoryStorage, Session
async def use(session):
{body}
async def main():
    async with {session} as session:
        await use(session)
asyncio.run(main())
"""


def in_session(body: str, session: str = "Session(MemoryStorage())") -> str:
    return SESSION.format(body="".join(f"    {line}\n" for line in body.strip().splitlines()), session=session)


def test_redis(install: Install, redis_url: str) -> None:
    body = "await session.save_artifact('a', 'kept')\nprint((await session.run(\"artifacts.load('a')\")).value)"
    source = in_session(body, f"Session(carrel.RedisStorage({redis_url!r}, prefix='packaging'), owns_storage=True)")
    assert install("redis").run(f"import carrel\n{source}") == "kept\n"


def test_postgres(install: Install) -> None:
    try:
        server = RealPostgres().start()
    except NoPostgres as reason:
        skip_without(f"no Postgres: {reason}")
    try:
        body = "await session.save_artifact('a', 'kept')\nprint((await session.run(\"artifacts.load('a')\")).value)"
        source = in_session(body, f"Session(carrel.PostgresStorage({server.url!r}), owns_storage=True)")
        assert install("postgres").run(f"import carrel\n{source}") == "kept\n"
    finally:
        server.remove()


def test_mcp(install: Install) -> None:
    server = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("sums")
@server.tool()
def add(a: int, b: int) -> int:
    return a + b
server.run()
"""
    environment = install("mcp")
    tools = environment.folder / "base" / "tools"
    tools.mkdir(parents=True)
    (environment.folder / "server.py").write_text(server)
    program = f"{environment.folder}/venv/bin/python"
    (tools / "sums.yaml").write_text(
        f"name: sums\ntype: mcp\ntransport: stdio\ncommand: {program}\nargs: [{environment.folder}/server.py]\n"
    )
    assert (
        environment.run(
            in_session(
                "print((await session.run('tools.sums.add(a=2, b=3)[\"result\"]')).value)", "Session.from_base('base')"
            )
        )
        == "5\n"
    )


def test_server(install: Install) -> None:
    source = """
import json, signal, subprocess
from carrel import Client
server = subprocess.Popen(["carrel", "serve", "--port", "0", "--data", "data", "--json"], stdout=subprocess.PIPE)
started = json.loads(server.stdout.readline())
client = Client(base_url=started["url"], api_key=started["key"])
session = client.sessions.create(dataset="demo", sample_id="calc-1")
print(client.sessions.execute_command(session_id=session.session_id, command="ls").stdout)
client.sessions.close(session_id=session.session_id)
server.send_signal(signal.SIGINT)
print(server.wait())
"""
    assert "calc.py" in install("server").run(source)


def test_container(install: Install, docker_engine: str) -> None:
    session = f"Session.container('base', image={IMAGE!r}, docker_host={docker_engine!r})"
    assert install("container").run(in_session("print((await session.run('6 * 7')).value)", session)) == "42\n"


def test_otel(install: Install) -> None:
    set_up = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
spans = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(spans))
"""
    source = set_up + in_session("await session.run('1')") + "print(len(spans.get_finished_spans()))"
    assert install("otel", "opentelemetry-sdk").run(source) == "1\n"


def test_search(install: Install) -> None:
    body = """
await session.add_workflow("rates", "def run():\\n    return 1\\n", "Convert money between currencies")
await session.add_workflow("stars", "def run():\\n    return 1\\n", "Distance to a star")
while not (found := await session.search_workflows("exchange dollars")):  # The vectors are being made.
    await asyncio.sleep(0.05)
print(found[0]["name"], "numpy" in __import__("sys").modules)
"""
    assert install("search").run(in_session(body)) == "rates True\n"


def test_uv(install: Install) -> None:
    environment = install("uv")
    build_wheel(environment.folder / "wheels", "carrel_greeting", source="WORD = 'hello'\n")
    body = """
await session.add_dep("carrel_greeting")
print((await session.run("import carrel_greeting; carrel_greeting.WORD")).value)
"""
    printed = environment.run(in_session(body, "Session.from_base('base', wheelhouse='wheels')"))
    assert printed.splitlines()[-1] == "hello"
