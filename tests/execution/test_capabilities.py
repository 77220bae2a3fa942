"""What is in force: capabilities that are true, limits that hold, and a required sandbox that is one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import pytest

from carrel.errors import ConfigurationError, ForkRefused, SandboxUnavailable
from carrel.execution.capabilities import Confinement, confinement, probe
from carrel.execution.config import Limits, Mount, SubprocessConfig, sandbox_mode
from carrel.execution.in_process import InProcessExecutor
from carrel.execution.results import ending_of
from carrel.execution.subprocess_executor import SubprocessExecutor

MIB = 1024 * 1024


async def test_capabilities_are_what_is_in_force() -> None:
    packages = {"deps_install", "deps_uninstall"}
    assert InProcessExecutor().supported_capabilities() == {"timeout", "reset", "interrupt", "streaming"} | packages
    off = SubprocessExecutor(SubprocessConfig(sandbox="off", network=False)).supported_capabilities()
    assert off == {"timeout", "reset", "interrupt", "streaming", "process_isolation"} | packages
    whole = SubprocessConfig(sandbox="auto", network=False, limits=Limits(memory=256 * MIB, cpus=1))
    root = {"root_user"} if os.geteuid() == 0 else set()
    more = {"filesystem_isolation", "network_isolation", "fork"} | root
    held = {part.name for part in probe() if part.in_force}
    more |= {f"{name}_limit" for name in ("cpu", "memory") if name in held}
    assert SubprocessExecutor(whole).supported_capabilities() == off | more
    plain = SubprocessExecutor(SubprocessConfig(sandbox="required")).supported_capabilities()
    assert plain == off | {"filesystem_isolation", "fork"} | root


async def test_a_part_that_is_missing_is_no_capability(tmp_path: Path) -> None:
    without = Confinement(("user", "mount", "pid"), confined=True)
    config = SubprocessConfig(network=False, limits=Limits(cpus=1, memory=MIB))
    assert not {"network_isolation", "cpu_limit", "memory_limit", "fork"} & without.capabilities(config)
    writes = SubprocessConfig(workspace=tmp_path, workspace_mode="rw")
    assert "fork" not in SubprocessExecutor(writes).supported_capabilities()


async def test_a_memory_bomb_costs_the_run_and_not_the_session() -> None:
    config = SubprocessConfig(sandbox="auto", limits=Limits(memory=128 * MIB))
    async with SubprocessExecutor(config) as executor:
        await executor.run("x = 5")
        result = await executor.run("big = []\nwhile True: big.append(bytearray(1 << 20))", timeout=60)
        assert (result.error_type, result.state) in [("OutOfMemory", "restored"), ("MemoryError", "kept")]
        assert (await executor.run("big = None\nx")).value == 5
        # The kernel's count stands for ever; a later death is not for want of memory.
        later = await executor.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert (later.error_type, later.state) == ("Crashed", "restored")


async def test_a_fork_that_runs_out_of_memory_says_so_and_its_parent_does_not() -> None:
    if not any(part.name == "memory" and part.in_force for part in probe()):
        pytest.skip("a limit on the memory of a whole session needs a cgroup that we may make")
    config = SubprocessConfig(sandbox="required", limits=Limits(memory=128 * MIB))
    async with SubprocessExecutor(config) as executor:
        await executor.run("x = 5")
        async with await executor.fork() as fork:
            result = await fork.run("big = []\nwhile True: big.append(bytearray(1 << 20))", timeout=60)
            assert result.error_type == "OutOfMemory", result
        later = await executor.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert later.error_type == "Crashed", later


@pytest.mark.parametrize(("settings", "why"), [({"sandbox": "off"}, "sandbox"), ({"workspace_mode": "rw"}, "mode rw")])
async def test_a_missing_fork_has_a_reason(tmp_path: Path, settings: dict[str, str], why: str) -> None:
    async with SubprocessExecutor(SubprocessConfig(workspace=tmp_path, **settings)) as executor:  # type: ignore[arg-type]
        await executor.run("x = 5")
        with pytest.raises(ForkRefused, match=why):
            await executor.fork()
        assert "fork" not in executor.supported_capabilities()
        assert (await executor.run("x")).value == 5


async def test_a_full_disk_costs_nothing_of_a_file_that_is_changed() -> None:
    config = SubprocessConfig(sandbox="required", limits=Limits(disk=2 * MIB))
    async with SubprocessExecutor(config) as executor:
        content = b"A" * 500_000 + b"MARK" + b"B" * 100
        await executor.write_file("code.py", content)
        await executor.run("open('fill', 'wb').write(b'x' * 1_200_000)")
        with pytest.raises(OSError, match="space"):
            await executor.str_replace("code.py", "MARK", "C" * 900_000)
        with pytest.raises(OSError, match="space"):
            await executor.write_file("code.py", b"D" * 1_500_000)
        assert await executor.read_file("code.py") == content
        assert [entry.name for entry in await executor.list_files()] == ["code.py", "fill"]


async def test_the_disk_limit_is_an_error_of_the_code() -> None:
    async with SubprocessExecutor(SubprocessConfig(sandbox="required", limits=Limits(disk=8 * MIB))) as executor:
        result = await executor.run("open('f', 'wb').write(b'x' * (16 << 20))")
        assert result.error_type == "OSError"
        assert (await executor.exec("rm f; echo fine > g; cat g")).stdout == "fine\n"


async def test_a_fork_bomb_is_an_error_of_the_code() -> None:
    async with SubprocessExecutor(SubprocessConfig(sandbox="required", limits=Limits(processes=30))) as executor:
        await executor.run("x = 5")
        code = "import subprocess\nfor _ in range(100): subprocess.Popen(['sleep', '100'])"
        assert (await executor.run(code)).error_type == "BlockingIOError"
        assert (await executor.run("x")).value == 5


async def test_mounts_are_shown_at_their_targets(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("given")
    (tmp_path / "rw").mkdir()
    mounts = (Mount(source=tmp_path, at="/data"), Mount(source=tmp_path / "rw", at="/out", mode="rw"))
    async with SubprocessExecutor(SubprocessConfig(sandbox="required", mounts=mounts)) as executor:
        assert (await executor.run("open('/data/f').read()")).value == "given"
        assert (await executor.run("open('/data/f', 'w')")).error_type in ("OSError", "PermissionError")
        assert (await executor.run("open('/out/g', 'w').write('made')")).is_ok
    assert (tmp_path / "rw" / "g").read_text() == "made"


async def test_one_session_does_not_see_another() -> None:
    one, other = (SubprocessExecutor(SubprocessConfig(sandbox="required")) for _ in range(2))
    try:
        await one.run("open('/tmp/secret', 'w').write('s'); open('here', 'w').write('s')")
        found = await other.exec("ls /tmp /workspace; ps ax | wc -l")
        assert "secret" not in found.stdout
        assert "here" not in found.stdout
    finally:
        await asyncio.gather(one.close(), other.close())


def test_the_variable_is_the_default_and_never_weakens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARREL_SANDBOX", raising=False)
    assert sandbox_mode(None) == "auto"
    monkeypatch.setenv("CARREL_SANDBOX", "off")
    assert sandbox_mode(None) == "off"
    assert sandbox_mode("required") == "required"
    assert sandbox_mode("auto") == "auto"
    monkeypatch.setenv("CARREL_SANDBOX", "nonsense")
    with pytest.raises(ConfigurationError, match="CARREL_SANDBOX"):
        sandbox_mode(None)


def test_a_required_sandbox_that_is_not_there_says_what_is_missing() -> None:
    parts = tuple(
        dataclasses.replace(part, in_force=False, why="EPERM", how_to_get_it="sysctl x=1")
        if part.name == "net"
        else part
        for part in probe()
    )
    with pytest.raises(SandboxUnavailable, match=r"network.*EPERM.*sysctl x=1"):
        confinement("required", SubprocessConfig(), parts)
    assert confinement("auto", SubprocessConfig(), parts).confined


@pytest.mark.parametrize("settings", [{"sandbox": "maybe"}, {"workspace_mode": "rx"}, {"workspace": Path("/nowhere")}])
def test_settings_that_make_no_sense_are_named(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        SubprocessConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "broke", "message"),
    [
        (3 << 8, "", "exit code 3"),
        (11, "", "SIGSEGV: a segmentation fault"),
        (31, "", "SIGSYS: a system call that the sandbox refuses"),
        (9, "", "SIGKILL"),
        (64, "", "SIGRTMAX"),
        (63, "", "signal 63"),
        (None, "", "ended"),
        (None, "it sent nonsense", "it sent nonsense"),
    ],
)
def test_an_ending_is_described_in_words(status: int | None, broke: str, message: str) -> None:
    ending = ending_of(status, broke)
    assert ending.error_type == "Crashed"
    assert message in ending.text


async def test_asking_what_is_possible_before_the_start_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text("given")
    executor = SubprocessExecutor(SubprocessConfig(sandbox="off", workspace=tmp_path))
    assert "timeout" in executor.supported_capabilities()
    try:
        assert (await executor.run("open('given.txt').read()")).value == "given"
        await executor.run("open('given.txt', 'w').write('changed')")
        assert (tmp_path / "given.txt").read_text() == "given"
        assert [change.path for change in await executor.changed_files()] == ["given.txt"]
    finally:
        await executor.close()
