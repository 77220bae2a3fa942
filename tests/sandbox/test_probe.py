"""What this machine can do: found by trying, also on machines that can do less."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from carrel.execution import capabilities as probe
from tests.sandbox.conftest import Host
from tests.sandbox.host import Session, readable

NAMESPACES = {"user", "mount", "pid", "ipc", "uts", "net", "overlay"}


def tried(host: Host, *around: str) -> dict[str, dict[str, str | None]]:
    drop = [] if host.user is None else ["setpriv", f"--reuid={host.user}", f"--regid={host.user}", "--clear-groups"]
    command = [*drop, *around, host.python, "-I", str(readable("guest") / "sandbox" / "__main__.py"), "probe"]
    found: dict[str, dict[str, str | None]] = json.loads(subprocess.check_output(command, text=True))
    return found


def test_this_machine_can_do_it_all(host: Host) -> None:
    """Where it cannot, the rest of these tests could not run either."""
    parts = tried(host)["parts"]
    assert {name for name, error in parts.items() if error is not None} == set()


def test_a_machine_without_user_namespaces(host: Host) -> None:
    # A user namespace may forbid further ones: the same answer as from a kernel that has them switched off.
    off = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    parts = tried(host, "unshare", "-r", "sh", "-c", off, "sh")["parts"]
    assert {name for name, error in parts.items() if error is not None} == NAMESPACES
    assert "No space left" in str(parts["user"])


NO_MAPS = """
from carrel.guest.sandbox import probe_child
def refused(*_): raise PermissionError(1, "Operation not permitted")
probe_child.namespaces.write_maps = refused
print(probe_child._try_in_child(probe_child.USER, lambda: None))
"""


def test_where_no_ids_may_be_mapped_the_result_says_so() -> None:
    output = subprocess.check_output([sys.executable, "-c", NO_MAPS], text=True, timeout=60)
    assert output == "the id maps could not be written: [Errno 1] Operation not permitted\n"


def test_the_parts_are_reported_with_a_reason_and_a_remedy() -> None:
    parts = probe.probe()
    assert [part.name for part in parts] == list(probe.WHAT)
    for part in parts:
        assert part.what
        assert bool(part.why) is bool(part.how_to_get_it) is not part.in_force
    assert probe.probe() is parts


def test_of_many_who_ask_at_once_one_tries(tmp_path: Path) -> None:
    python, tries = tmp_path / "python", tmp_path / "tries"
    python.write_text(f'#!/bin/sh\necho once >> {tries}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(probe.probe, [str(python)] * 8))
    assert found == [found[0]] * 8
    assert tries.read_text() == "once\n"


def test_every_part_has_a_remedy() -> None:
    assert all(len(probe.remedy(name)) > 10 for name in probe.WHAT)


def test_what_is_missing_is_left_out() -> None:
    def machine(*missing: str) -> tuple[probe.HostPart, ...]:
        return tuple(probe.HostPart(name, "", name not in missing, "", "") for name in probe.WHAT)

    assert set(probe.usable(machine())) == {*NAMESPACES, "seccomp", "landlock", "fork", "cgroup"}
    assert "overlay" not in probe.usable(machine("overlay"))
    assert probe.usable(machine("memory", "pids", "cpu"))[-1] == "fork"
    assert probe.usable(machine("user")) == ["seccomp", "landlock", "cgroup"]
    assert not probe.can_confine(machine("pid"))


def test_without_namespaces_the_rest_still_holds(start: Callable[..., Session], folder: Path, host: Host) -> None:
    """`sandbox="auto"` on a machine that has no user namespaces: Landlock and the filter, on the host's own paths."""
    workspace = {"source": str(folder), "mode": "rw"}
    session = start(parts=["seccomp", "landlock", "cgroup"], workspace=workspace)
    assert session.value("import os; open('made', 'w').write('x'); answer = os.getcwd()") == str(folder)
    assert (folder / "made").read_text(encoding="utf-8") == "x"
    assert session.run("open('/etc/hostname')")["errno"] == 13
    assert session.run(f"open({str(folder.parent / 'x')!r}, 'w')")["errno"] == 13
    assert session.run("open('/usr/x', 'w')")["errno"] == 13
    assert session.run("import os; os.chroot('/')")["errno"] == 1
    assert session.run(f"import os; os.kill({session.pid}, 9)")["errno"] == 1
    assert session.value("import subprocess; answer = subprocess.getoutput('echo hello')") == "hello"


def test_without_any_sandbox(start: Callable[..., Session], folder: Path) -> None:
    session = start(sandbox="off", workspace={"source": str(folder), "mode": "rw"})
    session.value("import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); answer = p.pid")
    below = session.value("answer = p.pid")
    session.close()
    assert not Path(f"/proc/{below}").exists()
