"""Containers of a real engine: what keeps code in, what is left behind, and the error where something is missing."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel import Session
from carrel.errors import CarrelError, ForkRefused, SandboxUnavailable
from carrel.execution import container_transport
from carrel.execution.capabilities import engine_parts
from carrel.execution.config import ContainerConfig, Limits, Mount
from carrel.execution.container_executor import ContainerExecutor
from carrel.execution.docker_engine import LABEL, Engine, connect, plain_socket
from tests.execution.processes import descriptors, until
from tests.support.missing_parts import skip_without
from tests.support.real_docker import IMAGE
from tests.support.wheels import build_wheel

MIB = 1024 * 1024


@pytest.fixture
def engine(docker_engine: str) -> Engine:
    return connect(docker_engine)


def containers(engine: Engine, label: str = LABEL) -> set[str]:
    found = engine._api.containers(all=True, filters={"label": label})
    return {container["Id"] for container in found}


async def gone(engine: Engine, container: str) -> bool:
    for _ in range(600):
        if container not in await asyncio.to_thread(containers, engine):
            return True
        await asyncio.sleep(0.1)
    return False


CONFINED = """
import os, pathlib, socket
status = dict(line.split(":\\t", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
found = {name: status[name] for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")}
found["uid"] = os.getuid()
for path in ("/etc/x", "/opt/carrel/x", "/root/x", "/usr/x"):
    try:
        open(path, "w")
        found[path] = "written"
    except OSError:
        pass
found["devices"] = [name for name in os.listdir("/sys/class/net") if name != "lo"]
try:
    os.readlink("/proc/1/fd/1")
    found["init"] = "open"
except PermissionError:
    pass
found
"""


async def test_code_is_kept_in(docker_engine: str) -> None:
    limits = Limits(memory=256 * MIB, cpus=1, processes=64, disk=8 * MIB)
    config = ContainerConfig(image=IMAGE, docker_host=docker_engine, limits=limits)
    async with ContainerExecutor(config) as executor:
        found = (await executor.run(CONFINED)).value
        none = "0000000000000000"
        assert found == {"CapEff": none, "CapBnd": none, "NoNewPrivs": "1", "Seccomp": "2", "uid": 1000, "devices": []}
        has = executor.supported_capabilities()
        assert {"container_isolation", "network_isolation", "memory_limit", "cpu_limit", "deps_install"} <= has
        assert "fork" not in has
        await executor.run("x = 5")
        bomb = await executor.run("y = bytearray(10**9)\nfor n in range(0, 10**9, 4096): y[n] = 1", timeout=60)
        assert (bomb.error_type, bomb.state) == ("OutOfMemory", "restored")
        full = await executor.run("open('large', 'wb').write(bytes(9_000_000))")
        assert full.error_type == "OSError"
        many = await executor.run(
            "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()"
        )
        assert many.error_type == "RuntimeError"
        with pytest.raises(ForkRefused, match="cannot be rewound"):
            await executor.checkpoint()


@pytest.mark.parametrize("given", [True, False], ids=["a workspace", "an empty folder"])
async def test_a_fork_has_the_files_and_needs_no_variables(given: bool, docker_engine: str, tmp_path: Path) -> None:
    for name in ("kept", "gone", "changed"):
        (tmp_path / name).write_text(name)
    workspace = tmp_path if given else None
    wheel = build_wheel(tmp_path.parent / f"wheels-{given}", "carrel_tried", "1.0")
    config = ContainerConfig(image=IMAGE, docker_host=docker_engine, workspace=workspace, wheelhouse=wheel.parent)
    async with ContainerExecutor(config, handlers={}) as executor:
        await executor.exec(
            "rm -f gone; mkdir -p a; echo new > changed; ln -s changed a/link; echo > run; chmod 755 run"
        )
        await executor.run("x = 5")
        with pytest.raises(ForkRefused, match="the variables cannot be carried over: x"):
            await executor.fork()
        assert (await executor.run("x")).value == 5
        await executor.reset()
        await executor.install(["carrel_tried"])
        async with await executor.fork() as fork:
            seen = await fork.exec("cat changed; readlink a/link; ls; test -x run && python -c 'import carrel_tried'")
            assert seen.stdout.split()[:2] == ["new", "changed"], seen
            assert seen.stdout.split()[2:] == ["a", "changed", *(["kept"] if given else []), "run"]
            assert seen.success, seen
            assert await fork.changed_files() == await executor.changed_files()
            await fork.exec("echo fork > changed")
            assert await executor.read_file("changed") == b"new\n"
    rw = ContainerConfig(image=IMAGE, docker_host=docker_engine, workspace=tmp_path, workspace_mode="rw")
    async with ContainerExecutor(rw) as executor:
        with pytest.raises(ForkRefused, match="the files cannot be carried over"):
            await executor.fork()


async def test_folders_that_are_given_and_one_that_is_not_there(docker_engine: str, tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.mkdir()
    (odd / "file").write_text("seen")
    given = ContainerConfig(image=IMAGE, docker_host=docker_engine, mounts=[Mount(source=odd, at="/data")])
    async with ContainerExecutor(given) as executor:
        assert (await executor.run("open('/data/file').read()")).value == "seen"
        assert (await executor.run("open('/data/other', 'w')")).error_type == "OSError"
    missing = tmp_path / "missing"
    config = ContainerConfig(image=IMAGE, docker_host=docker_engine, mounts=[Mount(source=missing, at="/data")])
    with pytest.raises(CarrelError, match="missing"):
        await ContainerExecutor(config).start()
    assert not missing.exists()


async def test_capabilities_say_only_what_is_in_force(docker_engine: str) -> None:
    open_one = ContainerExecutor(ContainerConfig(docker_host=docker_engine, network=True, allow_runtime_deps=False))
    has = open_one.supported_capabilities()
    assert "container_isolation" in has
    assert not {"network_isolation", "memory_limit", "cpu_limit", "deps_install", "fork"} & has
    nowhere = ContainerExecutor(ContainerConfig(docker_host="unix:///nowhere/docker.sock"))
    assert nowhere.supported_capabilities() == set()


async def test_code_that_breaks_its_line_breaks_only_its_own_session(docker_engine: str) -> None:
    async with ContainerExecutor(ContainerConfig(image=IMAGE, docker_host=docker_engine)) as executor:
        await executor.run("x = 5")
        rubbish = "import os, stat\nfor n in range(3, 400):\n    try:\n        if stat.S_ISSOCK(os.fstat(n).st_mode): "
        for what in ("os.write(n, b'\\xff' * 99)", "os.close(n)", "os.write(n, b'\\0\\0\\0\\4junk')"):
            result = await executor.run(f"{rubbish}{what}\n    except OSError: pass\nimport time; time.sleep(25)")
            assert (result.error_type, result.state) == ("Crashed", "restored"), what
            assert (await executor.run("x")).value == 5
        # Its first process can neither be killed nor be spoken for.
        await executor.run("import os\nfor n in range(1, 65): os.kill(1, n)")
        assert (await executor.run("x")).value == 5


STOPPING = """
import os, signal, subprocess, sys
script = '''
import os, signal
print("on", flush=True)
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, WORKER, os.getpid()):
            try: os.kill(int(name), signal.SIGSTOP)
            except OSError: pass
'''
command = [sys.executable, "-c", script.replace("WORKER", str(os.getpid()))]
stopping = subprocess.Popen(command, stdout=subprocess.PIPE)
stopping.stdout.readline()
stopping.stdout.close()
"""


async def test_code_that_stops_who_brings_packages_in_stops_nothing_else(docker_engine: str, tmp_path: Path) -> None:
    build_wheel(tmp_path, "carrel-large", source=f"TEXT = {'x' * 4_000_000!r}\n")
    config = ContainerConfig(image=IMAGE, docker_host=docker_engine, wheelhouse=tmp_path)
    async with ContainerExecutor(config) as executor:
        await executor.run(STOPPING)
        installing = asyncio.create_task(executor.install(["carrel-large"]))
        for number in range(20):
            assert (await asyncio.wait_for(executor.run(str(number), timeout=30), 60)).value == number
            await asyncio.sleep(0.1)
        assert not installing.done()
        installing.cancel()
        await asyncio.wait([installing])
        await executor.run("stopping.kill(); stopping.wait()")
        await executor.install([])
        assert (await executor.run("import carrel_large; len(carrel_large.TEXT)")).value == 4_000_000


HOST = """
import asyncio, sys
from carrel import ContainerConfig, ContainerExecutor

async def main():
    executor = ContainerExecutor(ContainerConfig(image=sys.argv[1], docker_host=sys.argv[2], hostname="orphan"))
    await executor.run("import subprocess; subprocess.Popen(['sleep', '600'])")
    print(executor._connection.transport._container, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_nothing_is_left_after_a_close_nor_after_a_kill_of_the_host(docker_engine: str, engine: Engine) -> None:
    gc.collect()  # what earlier tests left for it to close is no part of this count
    open_before = descriptors()
    executor = ContainerExecutor(ContainerConfig(image=IMAGE, docker_host=docker_engine))
    await executor.run("import subprocess; subprocess.Popen(['sleep', '600'])")
    assert executor._connection is not None
    container = executor._connection.transport._container
    assert container in containers(engine)
    await executor.close()
    assert container not in containers(engine)
    # One for the pipe that the janitor of scratch folders reads, where it was not there before.
    await until(lambda: descriptors() <= open_before + 1)

    with subprocess.Popen([sys.executable, "-c", HOST, IMAGE, docker_engine], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        orphan = (await asyncio.to_thread(host.stdout.readline)).decode().strip()
        assert orphan in containers(engine)
        host.kill()
    assert await gone(engine, orphan)


async def test_one_that_was_made_and_never_started_is_swept_away(engine: Engine) -> None:
    made = engine.create({"image": IMAGE, "entrypoint": ["true"], "labels": {"carrel.left": "by another program"}}, {})
    other = engine.create({"image": IMAGE, "entrypoint": ["true"], "labels": {"carrel.other": "x"}}, {})
    try:
        engine.sweep("carrel.left")
        assert made in containers(engine, "carrel.left"), "another program may be about to start it"
        engine.sweep("carrel.left", unused=-1)
        assert containers(engine, "carrel.left") == set()
        assert containers(engine, "carrel.other") == {other}
    finally:
        engine.remove(other)
        engine.remove(made)


def test_the_engine_is_the_one_that_the_environment_names_now(
    docker_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    found = connect()
    assert connect() is found
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxUnavailable, match="unix:///nowhere"):
        connect()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"docker_host": "unix:///nowhere/docker.sock"}, "No such file.*DOCKER_HOST"),
        ({"image": "127.0.0.1:1/missing:1"}, "could not be pulled.*image=.*pack_image"),
        ({"runtime": "kata"}, "no runtime kata"),
    ],
)
async def test_a_missing_part_is_named_in_the_error(docker_engine: str, settings: dict[str, str], message: str) -> None:
    executor = ContainerExecutor(ContainerConfig(**{"image": IMAGE, "docker_host": docker_engine, **settings}))  # type: ignore[arg-type]
    with pytest.raises(SandboxUnavailable, match=message):
        await executor.start()
    assert (await executor.run("1")).error_type == "SandboxUnavailable"
    await executor.close()


async def test_what_cannot_start_says_why_and_leaves_nothing(docker_engine: str, engine: Engine) -> None:
    slow = ContainerExecutor(ContainerConfig(image=IMAGE, docker_host=docker_engine, startup_timeout=0))
    result = await slow.run("1")
    assert (result.error_type, "not ready within 0 s" in (result.error or "")) == ("SpawnFailed", True)
    assert slow._connection is None
    await slow.close()
    mine = f"carrel.host={os.uname().nodename}:{os.getpid()}"
    assert containers(engine, mine) == set()


async def test_a_workspace_that_does_not_fit_into_its_memory_is_an_error(docker_engine: str, tmp_path: Path) -> None:
    with open(tmp_path / "big", "wb") as file:
        file.truncate(150 * MIB)
    config = ContainerConfig(image=IMAGE, docker_host=docker_engine, workspace=tmp_path, limits=Limits(memory=64 * MIB))
    async with asyncio.timeout(60):
        result = await ContainerExecutor(config).run("1")
    assert result.error_type == "SpawnFailed", result
    assert "copy files into the container" in (result.error or "")


async def test_a_container_that_stands_still_is_given_up(
    docker_engine: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_transport, "KILL_TIME", 0.5)
    async with ContainerExecutor(ContainerConfig(image=IMAGE, docker_host=docker_engine, grace=0.5)) as executor:
        await executor.run("x = 1")
        assert executor._connection is not None
        container = executor._connection.transport._container
        await asyncio.to_thread(engine._api.pause, container)
        async with asyncio.timeout(60):
            result = await executor.run("x", timeout=0.5)
        assert (result.error_type, result.state) == ("Timeout", "lost"), result
        assert (await executor.run("1 + 1")).value == 2
    assert await gone(engine, container)


async def test_another_kernel_in_between(docker_engine: str, engine: Engine) -> None:
    if not engine.has_runtime("runsc"):
        skip_without("no gVisor: runsc is not in PATH (Debian: apt-get install runsc)")
    config = ContainerConfig(image=IMAGE, docker_host=docker_engine, runtime="runsc", grace=30)
    async with ContainerExecutor(config) as executor:
        release = (await executor.run("import os; os.uname().release")).value
        assert release != os.uname().release
        await executor.run("x = 5")
        assert (await executor.run("while True: pass", timeout=0.5)).state == "kept"
        crashed = await executor.run("x = 6; os._exit(3)")
        assert (crashed.state, (await executor.run("x")).value) == ("restored", 5)
        done = await executor.exec("echo begun; sleep 60 & sleep 60", timeout=3)
        assert (done.exit_code, done.stdout) == (124, "begun\n")
        assert (await executor.exec("cat; exit 3", stdin="typed")).exit_code == 3


@pytest.fixture(params=["http", "https"])
def gate(
    docker_engine: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A gate in front of the engine, over TCP and TLS, that lets in who has the token."""
    secured: ssl.SSLContext | None = None
    if request.param == "https":
        if shutil.which("openssl") is None:
            skip_without("no openssl to make a certificate with")
        key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
        make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=gate -addext subjectAltName=IP:127.0.0.1"
        subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", certificate)
        secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        secured.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_keep_gate, args=(listener, docker_engine, secured), daemon=True).start()
        yield f"{request.param}://127.0.0.1:{listener.getsockname()[1]}"


def _keep_gate(listener: socket.socket, engine: str, secured: ssl.SSLContext | None) -> None:
    while True:
        try:
            visitor, _ = listener.accept()
            visitor = plain_socket(secured.wrap_socket(visitor, server_side=True)) if secured else visitor
        except OSError:
            return
        first = visitor.recv(1 << 16)
        if b"Authorization: Bearer open-sesame" not in first:
            visitor.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            visitor.close()
            continue
        inner = socket.socket(socket.AF_UNIX)
        inner.connect(engine.removeprefix("unix://"))
        inner.sendall(first)
        for source, target in ((visitor, inner), (inner, visitor)):
            threading.Thread(target=_carry, args=(source, target), daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


async def test_an_engine_elsewhere_behind_a_gate(gate: str) -> None:
    config = ContainerConfig(image=IMAGE, remote_url=gate, auth_token="open-sesame")
    async with ContainerExecutor(config) as executor:
        assert (await executor.run("print('over there')\n6 * 7")).value == 42
        assert (await executor.run("print('x' * 3_000_000)")).stdout == "x" * 3_000_000 + "\n"
        await executor.write_file("large", b"y" * 3_000_000)
        assert await executor.read_file("large") == b"y" * 3_000_000
    with pytest.raises(SandboxUnavailable, match="401"):
        await ContainerExecutor(ContainerConfig(image=IMAGE, remote_url=gate, auth_token="wrong")).start()


async def test_a_session_in_a_container(docker_engine: str, tmp_path: Path) -> None:
    settings = {"image": IMAGE, "docker_host": docker_engine, "env": {"GIVEN": "yes"}}
    async with Session.container(tmp_path / "base", timeout=30, **settings) as session:  # type: ignore[arg-type]
        session.register_tool(lambda city: {"Oslo": -3}[city], name="temperature")
        assert (await session.run("tools.temperature(city='Oslo')")).value == -3
        await session.run("artifacts.save('made.txt', 'inside')")
        assert (await session.execute_command("echo $GIVEN > f; cat f")).stdout == "yes\n"
        assert await session.read_file("f") == b"yes\n"
        assert session.supports("container_isolation")
        closed = await session.run("deps.add('anything')")
        assert "no network" in (closed.error or "")
    assert (tmp_path / "base" / "artifacts").is_dir()


def test_doctor_tells_of_the_engine(docker_engine: str, engine: Engine) -> None:
    found, kernel = engine_parts(docker_engine)
    assert (found.in_force, engine.version() in found.what) == (True, True)
    assert kernel.in_force == engine.has_runtime("runsc")
    none, _ = engine_parts("unix:///nowhere/docker.sock")
    assert (none.in_force, "No such file" in none.why) == (False, True)
    assert "DOCKER_HOST" in none.how_to_get_it
