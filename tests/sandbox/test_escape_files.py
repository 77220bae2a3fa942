"""Attempts to read or write files of the host; each must fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.attempts import EACCES, ENOENT, EPERM, EROFS, RAW
from tests.sandbox.conftest import Host
from tests.sandbox.host import Session

ROOM = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that every user of the host may read, at a path that every user may walk."""
    path = tmp_path_factory.mktemp("open") / "secret.txt"
    path.write_text("host", encoding="utf-8")
    path.chmod(0o666)
    for above in path.parents[:-2]:
        if above.stat().st_uid == os.geteuid():
            above.chmod(above.stat().st_mode | 0o055)
    return path


def fails(session: Session, code: str, *numbers: int) -> None:
    reply = session.run(RAW + code)
    assert reply.get("errno") in numbers, reply


def test_a_file_by_its_path(inside: Session, secret: Path) -> None:
    fails(inside, f"open({str(secret)!r})", ENOENT)


def test_a_file_through_a_symlink(inside: Session, secret: Path) -> None:
    fails(inside, f"os.path.lexists('l') or os.symlink({str(secret)!r}, 'l')\nopen('l')", ENOENT)


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/etc/sudoers", "/etc/ssh", "/root/.bashrc", "/var/log", "/boot", "/srv"]
)
def test_the_host_s_own_files(inside: Session, path: str) -> None:
    fails(inside, f"os.stat({path!r})", ENOENT, EACCES)


@pytest.mark.parametrize("name", ["root", "cwd", "exe", "fd", "mem", "environ", "maps", "ns/mnt", "stack"])
def test_init_s_view_in_proc(inside: Session, name: str) -> None:
    path = f"/proc/1/{name}"
    fails(inside, f"os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read(1)", EACCES, EPERM, ENOENT)


def test_no_process_of_the_host_is_in_proc(inside: Session) -> None:
    fails(inside, f"os.stat('/proc/{os.getpid()}')", ENOENT)


def test_every_open_file_is_the_session_s_own(start: Callable[..., Session]) -> None:
    session = start()
    names = session.value("import os; answer = os.listdir('/proc/self/fd')")
    code = "p = '/proc/self/fd/{}'\nanswer = os.readlink(p) if os.path.lexists(p) else ''"
    links = [session.value(code.format(name)) for name in names]
    kinds = sorted(link.split(":")[0] for link in links if link)
    assert kinds == ["/dev/null", "pipe", "pipe", "socket", "socket"]


def test_no_folder_of_another_root_is_open(inside: Session) -> None:
    code = "found = [n for n in range(256) if os.path.exists(f'/proc/self/fd/{n}/etc')]\nanswer = found"
    assert inside.value(RAW + code) == []


def test_the_old_root_is_gone(inside: Session) -> None:
    assert inside.value("import os; os.chdir('/'); os.chdir('../../..'); answer = 'boot' in os.listdir('.')") is False
    inside.value("os.chdir('/workspace')")


def test_the_hidden_folder_of_init(inside: Session) -> None:
    fails(inside, "os.listdir('/.carrel')", EACCES)
    fails(inside, "os.stat('/.carrel/scratch')", EACCES, ENOENT)
    fails(inside, "os.chmod('/.carrel', 0o777)", EROFS, EPERM)


def test_files_by_handle(inside: Session) -> None:
    fails(inside, "raw(303, -100, b'/usr', ctypes.create_string_buffer(200), ctypes.create_string_buffer(8), 0)", EPERM)
    fails(inside, "raw(304, -100, ctypes.create_string_buffer(200), 0)", EPERM)


@pytest.mark.parametrize(
    "path", ["/usr/x", "/etc/passwd", "/etc/x", "/x", "/bin/x", "/dev/x", "/proc/x", "/sys/x", "/lib/x"]
)
def test_writing_outside(inside: Session, path: str) -> None:
    fails(inside, f"open({path!r}, 'w')", EROFS, EACCES, ENOENT)


def test_writing_the_interpreter(inside: Session, host: Host) -> None:
    for folder in host.readonly:
        fails(inside, f"open({folder!r} + '/x', 'w')", EROFS)
        fails(inside, f"os.chmod({folder!r}, 0o777)", EROFS)
        fails(inside, f"os.utime({folder!r})", EROFS)


@pytest.mark.parametrize(
    "path", ["kernel/hostname", "kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory", "kernel/ns_last_pid"]
)
def test_the_kernel_s_settings(inside: Session, path: str) -> None:
    fails(inside, f"open('/proc/sys/{path}', 'w')", EROFS, EACCES, ENOENT)


@pytest.mark.parametrize("name", ["kcore", "kmsg", "keys", "kallsyms", "timer_list", "iomem", "config.gz", "cmdline"])
def test_the_kernel_s_secrets_are_empty_or_closed(inside: Session, name: str) -> None:
    code = f"p = '/proc/{name}'\nanswer = open(p, 'rb').read(10).decode('latin1') if os.path.exists(p) else ''"
    reply = inside.run(RAW + code)
    assert reply.get("value") == "" or reply["errno"] == EACCES, reply


def test_sysrq(inside: Session) -> None:
    fails(inside, "open('/proc/sysrq-trigger', 'w').write('h')", EROFS, EACCES, ENOENT)


def test_a_hard_link_out_of_the_system(inside: Session) -> None:
    fails(inside, "os.link('/usr/bin/env', '/tmp/env')", 18, EPERM)


def test_device_nodes(inside: Session) -> None:
    for kind in ("S_IFBLK", "S_IFCHR"):
        fails(inside, f"import stat\nos.mknod('/tmp/d', stat.{kind} | 0o666, os.makedev(8, 0))", EPERM)
    assert inside.value("os.mkfifo('/tmp/pipe'); os.remove('/tmp/pipe'); answer = 1") == 1


def test_no_disk_in_dev(inside: Session) -> None:
    code = "import stat\nanswer = [n for n in os.listdir('/dev') if stat.S_ISBLK(os.lstat('/dev/' + n).st_mode)]"
    assert inside.value(RAW + code) == []


@pytest.mark.parametrize("how", ["workspace", "mount", "kept"])
def test_no_set_user_id_program_is_left_on_the_host(start: Callable[..., Session], folder: Path, how: str) -> None:
    """Its owner would be the user who runs carrel, and anybody on the host could run it."""
    settings: dict[str, dict[str, Any]] = {
        "workspace": {"workspace": {"source": str(folder), "mode": "rw"}},
        "mount": {"mounts": [{"source": str(folder), "at": "/out", "mode": "rw"}]},
        "kept": {"workspace": {"source": None, "upper_dir": str(folder), "generation": "g"}},
    }
    session = start(**settings[how])
    at = "/out" if how == "mount" else "/workspace"
    session.value(f"import os; os.chdir({at!r}); open('p', 'w').close(); os.chmod('p', 0o755); os.mkdir('d')")
    for code in (
        "os.chmod('p', 0o4755)",
        "os.chmod('p', 0o2755)",
        "os.fchmod(os.open('p', os.O_RDONLY), 0o6755)",
        "os.umask(0); os.open('q', os.O_CREAT | os.O_WRONLY, 0o4755)",
        "os.open('.', os.O_TMPFILE | os.O_WRONLY, 0o4755)",
        "os.mknod('r', 0o104755)",
        "raw(452, -100, b'p', 0o4755, 0)",
    ):
        fails(session, code, EPERM)
    fails(session, "raw(437, -100, b's', ctypes.create_string_buffer(24), 24)", 38)
    assert [path for path in folder.rglob("*") if path.lstat().st_mode & 0o6000] == []


def test_a_setuid_program_stays_who_it_was(inside: Session) -> None:
    code = (
        "import subprocess, shutil\nshutil.copy('/usr/bin/id', '/tmp/id'); os.chmod('/tmp/id', 0o6755)\n"
        "found = [p for p in ('/usr/bin/su', '/usr/bin/passwd', '/usr/bin/mount') if os.path.exists(p)]\n"
        "answer = [subprocess.getoutput('/tmp/id -u'), subprocess.getoutput('echo | su -c id')]"
    )
    first, second = inside.value(RAW + code)
    assert first == "1000"
    assert "uid=0" not in second
