"""What an engine is requested to do, as literals, and what the host does with the stream: no engine is needed."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ConfigurationError
from carrel.execution.config import ContainerConfig, Limits, Mount, SubprocessConfig
from carrel.execution.container_executor import platform_of
from carrel.execution.container_settings import container_of, environment_of, host_of, image_of, user_of
from carrel.execution.container_transport import ContainerStream, ContainerTransport
from carrel.guest.channel import ChannelError
from carrel.guest.worker.container_init import CONTROL, HEAD
from tests.execution.kinds import IN_CONTAINERS

USUAL = "rw,exec,nosuid,nodev,mode=1777,size=1073741824,nr_inodes=200000"


def test_without_settings_it_has_nothing_of_the_machine() -> None:
    assert host_of(ContainerConfig()) == {
        "network_mode": "none",
        "read_only": True,
        "tmpfs": {
            "/tmp": USUAL,
            "/home/agent": USUAL,
            "/opt/packages": USUAL,
            "/workspace": f"{USUAL},uid=1000,gid=1000",
        },
        "mounts": [],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "auto_remove": True,
        "log_config": {"type": "none", "config": {}},
        "pids_limit": 512,
        "ulimits": [{"name": "nofile", "soft": 4096, "hard": 4096}],
    }


def test_an_engine_that_counts_no_files_gets_no_such_limit() -> None:
    tmpfs = host_of(ContainerConfig(), counts_files=False)["tmpfs"]
    assert "nr_inodes" not in tmpfs["/tmp"]
    assert "uid=" not in tmpfs["/workspace"]


def test_limits_runtime_network_and_folders_are_handed_on(tmp_path: Path) -> None:
    config = ContainerConfig(
        runtime="runsc",
        network="inner",
        limits=Limits(memory=1 << 30, cpus=1.5, processes=None, open_files=None, disk=None, files=None),
        mounts=[Mount(source="/usr/share", at="/data")],
        workspace=tmp_path,
        workspace_mode="rw",
    )
    host = host_of(config)
    assert (host["runtime"], host["network_mode"], host["nano_cpus"]) == ("runsc", "inner", 1_500_000_000)
    assert (host["mem_limit"], host["memswap_limit"]) == (1 << 30, 1 << 30)
    assert host["mounts"] == [
        {"Type": "bind", "Source": "/usr/share", "Target": "/data", "ReadOnly": True},
        {"Type": "bind", "Source": str(tmp_path), "Target": "/workspace", "ReadOnly": False},
    ]
    assert "/workspace" not in host["tmpfs"]
    assert host["tmpfs"]["/tmp"] == "rw,exec,nosuid,nodev,mode=1777"
    assert not {"pids_limit", "ulimits"} & host.keys()
    assert host_of(ContainerConfig(network=True))["network_mode"] == "default"


def test_who_the_code_is(tmp_path: Path) -> None:
    owner = tmp_path.stat()
    assert user_of(ContainerConfig()) == "1000:1000"
    assert user_of(ContainerConfig(workspace=tmp_path)) == "1000:1000"
    assert user_of(ContainerConfig(workspace=tmp_path, workspace_mode="ro")) == f"{owner.st_uid}:{owner.st_gid}"
    assert user_of(ContainerConfig(workspace=tmp_path, workspace_mode="rw", user="5")) == "5:5"
    container = container_of(ContainerConfig(image="own:1"), "5:6", ["python3"])
    assert (container["user"], container["image"]) == ("5:6", "own:1")
    assert container["entrypoint"] == ["python3", "-I", "/opt/carrel"]


def test_the_image_and_the_environment() -> None:
    assert image_of(ContainerConfig()) == f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"
    found = environment_of(ContainerConfig(env={"LANG": "de", "X": "1"}), "/bin")
    assert (found["PATH"], found["LANG"], found["X"]) == ("/bin:/opt/packages/bin", "de", "1")


@pytest.mark.parametrize(
    ("machine", "libc", "platform"),
    [
        ("x86_64", "glibc 2.36", "x86_64-manylinux_2_36"),
        ("x86_64", "glibc 2.30", "x86_64-manylinux_2_28"),
        ("aarch64", "glibc 2.99", "aarch64-manylinux_2_40"),
        ("x86_64", "", "x86_64-unknown-linux-musl"),
    ],
)
def test_the_platform_that_packages_are_for(machine: str, libc: str, platform: str) -> None:
    assert platform_of({"machine": machine, "libc": libc}) == platform


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"docker_host": "unix:///a", "remote_url": "https://b"}, "both set"),
        ({"auth_token": "t"}, "without remote_url"),
        ({"user": "root"}, "one number or two"),
        ({"workspace_mode": "readonly"}, "overlay, rw or ro"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ContainerConfig(**settings)  # type: ignore[arg-type]


def test_what_is_tried_in_containers_is_there() -> None:
    suite = Path(__file__).parent / "suite"
    written = {name for file in suite.glob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert written >= IN_CONTAINERS


async def test_answers_that_the_worker_has_not_read_are_bounded() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        transport = ContainerTransport(engine=None)  # type: ignore[arg-type]
        stream = ContainerStream(transport._take_frame, transport._stream_ended)
        await asyncio.get_running_loop().create_connection(lambda: stream, sock=ours)
        transport._stream = stream
        answer = {"op": "answer", "call": 1, "value": "x" * 1_000_000}
        transport.send(answer, max_unread=1_500_000)
        with pytest.raises(ChannelError, match="wait to be read already"):
            transport.send(answer, max_unread=1_500_000)
        control = json.dumps({"op": "passed", "bytes": 1_000_000}).encode()
        frame = HEAD.pack(CONTROL, len(control)) + control
        theirs.sendall(b"\1\0\0\0" + len(frame).to_bytes(4, "big") + frame)
        for _ in range(6000):
            if transport._unread <= 1000:
                break
            await asyncio.sleep(0.01)
        transport.send(answer, max_unread=1_500_000)
        stream.close()


@pytest.mark.parametrize("env", [{"A=B": "c"}, {"": "c"}, {"A": "secret\0"}, {"A\0": "c"}, {"A": 1}, {1: "a"}])
@pytest.mark.parametrize("config", [ContainerConfig, SubprocessConfig])
def test_variables_that_no_process_can_be_given(config: Any, env: Any) -> None:
    with pytest.raises(ConfigurationError, match="has the invalid variable") as refused:
        config(env=env)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("cpus", [float("nan"), float("inf"), 0, -1])
def test_a_share_that_is_no_number_above_nothing(cpus: float) -> None:
    with pytest.raises(ConfigurationError, match="it is a number above 0"):
        Limits(cpus=cpus)


@pytest.mark.parametrize("path", ["/", "//", "data", "", "/a/../etc", "/a\0", 5])
@pytest.mark.parametrize("config", [ContainerConfig, SubprocessConfig])
def test_places_inside_that_cannot_be_are_refused_by_name(config: Any, path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"workspace_at is .*an absolute path without"):
        config(workspace_at=path)
    with pytest.raises(ConfigurationError, match=r"a mount's `at` is .*an absolute path without"):
        config(mounts=[Mount(source="/usr", at=path)])


def test_sizes_of_limits_may_be_texts() -> None:
    limits = Limits(memory="256MiB", disk="2g")
    assert (limits.memory, limits.disk) == (256 << 20, 2 << 30)
    for wrong in ("much", "", "0", "-1MiB"):
        with pytest.raises(ConfigurationError, match="not a size"):
            Limits(memory=wrong)
