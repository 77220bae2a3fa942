"""The place a session is in: who it is, what it sees, what it can write, and where that goes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.guest.sandbox import root_fs
from tests.sandbox.conftest import Host
from tests.sandbox.host import Refused, Session, readable, wait_gone


def give(path: Path, host: Host, text: str = "given") -> Path:
    path.write_text(text, encoding="utf-8")
    if host.user is not None:
        os.chown(path, host.user, host.user)
    return path


def test_the_session_is_an_ordinary_user_without_capabilities(inside: Session) -> None:
    status = inside.value("answer = open('/proc/self/status').read()")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"] == fields["Gid"] == "1000\t1000\t1000\t1000"
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"


def test_outside_it_is_a_process_of_an_unused_user(inside: Session, host: Host) -> None:
    owner = os.stat(f"/proc/{inside.pid}/fd").st_uid if host.user is None else None
    status = Path(f"/proc/{inside.pid}/status").read_text(encoding="ascii")
    outside = int(next(line for line in status.splitlines() if line.startswith("Uid")).split()[1])
    assert outside == host.user if host.user is not None else outside >= 0x7000_0000
    assert owner in (None, 0)  # Not dumpable: its /proc belongs to root.


def test_nothing_of_the_host_s_environment_is_there(inside: Session) -> None:
    names = inside.value("import os; answer = sorted(os.environ)")
    assert names == ["HOME", "LANG", "LOGNAME", "PATH", "TMPDIR", "USER"]
    assert inside.value("answer = open('/proc/self/environ').read()").replace("\0", "") in ("", "PATH=/usr/bin:/bin")


def test_what_is_named_is_in_the_environment(start: Callable[..., Session]) -> None:
    session = start(env={"COLOUR": "green", "PATH": "/usr/bin"})
    assert session.value("import os; answer = [os.environ['COLOUR'], os.environ['PATH']]") == ["green", "/usr/bin"]


def test_only_the_processes_of_the_session_are_seen(inside: Session) -> None:
    assert inside.value("import os; answer = [int(n) for n in os.listdir('/proc') if n.isdigit()]") == [
        1,
        inside.ready["ready"],
    ]


def test_ordinary_programs_run(inside: Session) -> None:
    assert inside.value("import subprocess; answer = subprocess.check_output(['id', '-un'], text=True)") == "agent\n"
    assert inside.value("import subprocess; answer = subprocess.getoutput('echo $((6 * 7)); hostname')") == "42\ncarrel"
    assert (
        inside.value("import pty, os; a, b = pty.openpty(); os.write(b, b'x'); answer = os.read(a, 1).decode()") == "x"
    )
    assert inside.value("import multiprocessing as m; answer = m.get_context('fork').Pool(2).map(abs, [-1, 2])") == [
        1,
        2,
    ]
    assert inside.value("import threading; t = threading.Thread(target=print); t.start(); t.join(); answer = 1") == 1


def test_the_workspace_is_there_to_write_in(start: Callable[..., Session], host: Host) -> None:
    session = start()
    session.value(
        "for p in ('/workspace/a', '/tmp/a', '/home/agent/a', '/dev/shm/a', '/var/tmp/b'): open(p, 'w').write('x')"
    )
    assert session.value("import os; answer = os.getcwd()") == "/workspace"
    # A Python that lies below /tmp or /var/tmp, which are one folder inside, is seen at its own path.
    above = [(Path(path), folder) for path in host.readonly for folder in ("/tmp", "/var/tmp")]
    leads_to_python = {path.relative_to(folder).parts[0] for path, folder in above if path.is_relative_to(folder)}
    assert set(start().value("import os; answer = os.listdir('/workspace') + os.listdir('/tmp')")) == leads_to_python


def test_of_what_runs_it_nothing_is_seen(start: Callable[..., Session], host: Host) -> None:
    """All of the program was loaded before; only a checkout inside of the Python's own folder shows its files."""
    session = start()
    files = [str(path) for path in (readable("program"), readable("guest"), Path(__file__))]
    shown = [file for file in files if not any(root_fs.is_in(file, path) for path in host.readonly)]
    assert session.value(f"import os; answer = [os.path.exists(path) for path in {shown}]") == [False for _ in shown]
    assert (
        session.value("import traceback, carrel_guest.sandbox.live_fork, tests_inside.main; answer = 'loaded'")
        == "loaded"
    )


def test_an_overlay_leaves_the_folder_as_it_was(start: Callable[..., Session], folder: Path, host: Host) -> None:
    give(folder / "kept.txt", host)
    give(folder / "gone.txt", host)
    session = start(workspace={"source": str(folder), "mode": "overlay"})
    code = (
        "import os; open('kept.txt', 'a').write(' and more'); os.remove('gone.txt'); open('new', 'w').write('n');"
        "os.makedirs('d/e'); answer = [open('kept.txt').read(), sorted(os.listdir('.'))]"
    )
    assert session.value(code) == ["given and more", ["d", "kept.txt", "new"]]
    assert sorted(path.name for path in folder.iterdir()) == ["gone.txt", "kept.txt"]
    assert (folder / "kept.txt").read_text(encoding="utf-8") == "given"


def test_where_there_is_no_overlay_the_folder_is_copied(
    start: Callable[..., Session], folder: Path, host: Host
) -> None:
    give(folder / "kept.txt", host)
    parts = ["user", "mount", "pid", "ipc", "uts", "net", "seccomp", "landlock", "cgroup", "fork"]
    session = start(parts=parts, workspace={"source": str(folder), "mode": "overlay"})
    assert (
        session.value("open('kept.txt', 'a').write(' and more'); answer = open('kept.txt').read()") == "given and more"
    )
    assert (folder / "kept.txt").read_text(encoding="utf-8") == "given"


def test_the_host_can_look_at_what_was_changed(start: Callable[..., Session], folder: Path, host: Host) -> None:
    give(folder / "kept.txt", host)
    give(folder / "gone.txt", host)
    session = start(workspace={"source": str(folder), "mode": "overlay"})
    session.value("import os; open('new', 'w').write('made'); os.remove('gone.txt')")
    session.control.send({"op": "upper", "id": 3})
    record, (upper,) = session.hear()
    assert (record["op"], record["id"]) == ("upper", 3)
    try:
        assert sorted(os.listdir(upper)) == ["gone.txt", "new"]
        assert stat.S_ISCHR(os.stat("gone.txt", dir_fd=upper, follow_symlinks=False).st_mode)
        with open(os.open("new", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=upper), encoding="utf-8") as file:
            assert file.read() == "made"
    finally:
        os.close(upper)


def test_writing_to_a_closed_pipe_is_an_error_and_not_the_end(inside: Session) -> None:
    assert inside.run("import os; r, w = os.pipe(); os.close(r); os.write(w, b'x')")["error"] == "BrokenPipeError"


def test_a_writable_workspace_is_the_folder_itself(start: Callable[..., Session], folder: Path, host: Host) -> None:
    session = start(workspace={"source": str(folder), "mode": "rw"})
    session.value("open('made', 'w').write('inside')")
    assert (folder / "made").read_text(encoding="utf-8") == "inside"
    assert (folder / "made").stat().st_uid == folder.stat().st_uid


def test_a_read_only_workspace_refuses(start: Callable[..., Session], folder: Path, host: Host) -> None:
    give(folder / "kept.txt", host)
    session = start(workspace={"source": str(folder), "mode": "ro"})
    assert session.value("answer = open('kept.txt').read()") == "given"
    assert session.run("open('kept.txt', 'w')")["errno"] == 30


def test_kept_changes_outlive_the_session(start: Callable[..., Session], folder: Path, host: Host) -> None:
    for name in ("lower", "kept"):
        (folder / name).mkdir()
        os.chown(folder / name, folder.stat().st_uid, folder.stat().st_gid)
    workspace = {
        "source": str(folder / "lower"),
        "mode": "overlay",
        "upper_dir": str(folder / "kept"),
        "generation": "g",
    }
    first = start(workspace=workspace)
    first.value("open('made', 'w').write('before')")
    first.close()
    assert start(workspace=workspace).value("answer = open('made').read()") == "before"
    assert list((folder / "lower").iterdir()) == []


def test_extra_mounts(start: Callable[..., Session], folder: Path, host: Host) -> None:
    give(folder / "data.txt", host)
    mounts = [{"source": str(folder), "at": "/data", "mode": "ro"}, {"source": str(folder), "at": "/out", "mode": "rw"}]
    session = start(mounts=mounts)
    assert session.value("answer = open('/data/data.txt').read()") == "given"
    assert session.run("open('/data/x', 'w')")["errno"] == 30
    session.value("open('/out/x', 'w').write('y')")
    assert (folder / "x").read_text(encoding="utf-8") == "y"


@pytest.mark.parametrize("mode", ["overlay", "rw", "ro"])
def test_a_link_in_the_workspace_leads_no_mount_out(
    start: Callable[..., Session], folder: Path, host: Host, mode: str
) -> None:
    """What is made to mount on would be made on the host, where the link leads."""
    # Not below /tmp: while a place is built its own root is there.
    outside = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        outside.chmod(0o777)
        (folder / "link").symlink_to(outside)
        mounts = [{"source": str(folder), "at": "/workspace/link/made", "mode": "ro"}]
        with pytest.raises(Refused) as refused:
            start(workspace={"source": str(folder), "mode": mode}, mounts=mounts)
        assert refused.value.answer["step"] == "mount /workspace/link/made"
        assert list(outside.iterdir()) == []
    finally:
        shutil.rmtree(outside)


@pytest.mark.parametrize("at", ["/proc/x", "/usr/lib", "/", "relative", "/a/../etc"])
def test_a_mount_over_the_system_is_refused(start: Callable[..., Session], folder: Path, at: str) -> None:
    with pytest.raises(Refused) as refused:
        start(mounts=[{"source": str(folder), "at": at, "mode": "ro"}])
    assert at in refused.value.answer["message"]


def test_a_failed_step_is_named(start: Callable[..., Session], folder: Path) -> None:
    with pytest.raises(Refused) as refused:
        start(workspace={"source": str(folder / "missing"), "mode": "overlay"})
    assert refused.value.answer["step"] == f"open {folder / 'missing'}"
    assert refused.value.answer["errno"] == 2


def test_init_tells_of_the_worker_and_of_its_end(start: Callable[..., Session]) -> None:
    session = start()
    worker = session.hello["pid"]
    assert worker == session.ready["ready"] > 1
    signal.pidfd_send_signal(session.worker, signal.SIGKILL)
    record, _ = session.hear()
    assert record == {"op": "exited", "pid": worker, "status": signal.SIGKILL}


def test_close_ends_everything(start: Callable[..., Session]) -> None:
    session = start()
    session.value("import subprocess; [subprocess.Popen(['sleep', '1000'], start_new_session=True) for _ in range(5)]")
    session.control.send({"op": "close"})
    wait_gone(session.pid)
    assert session.run("1")["error"] == "Gone"
