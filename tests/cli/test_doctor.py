"""`carrel doctor`."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.conftest import Carrel

OFFLINE = {"UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple/"}
NO_REDIS = ("--store", "redis://:s3cret@127.0.0.1:1/0")


def test_every_part_has_a_row_and_a_missing_one_a_reason_and_a_remedy(carrel: Carrel, home: Path) -> None:
    found = json.loads(carrel("doctor", "--json", *NO_REDIS, env=OFFLINE).stdout)
    assert {"user", "mount", "pid", "net", "seccomp", "memory"} <= {part["name"] for part in found["parts"]}
    assert [part["name"] for part in found["containers"]] == ["engine", "runsc"]
    assert {"git", "uv", "mcp", "server", "redis"} <= {part["name"] for part in found["installed"]}
    assert found["versions"].keys() >= {"carrel", "Python"}
    assert found["embedder"] == "carrel-words-2"
    others = [found["disk"], found["package_index"], found["redis"]]
    assert [part["in_force"] for part in others] == [True, False, False]
    assert str(home) in found["disk"]["what"]
    rows = [*found["parts"], *found["containers"], *found["installed"], *others]
    assert [part["name"] for part in rows if not part["in_force"] and not (part["why"] and part["how_to_get_it"])] == []
    printed = carrel("doctor", *NO_REDIS, env=OFFLINE).stdout
    # The free space of the disk may differ by now.
    assert [part["what"] for part in rows if part["what"] not in printed and part != found["disk"]] == []
    assert "s3cret" not in printed


def test_a_redis_that_answers(carrel: Carrel, redis_url: str) -> None:
    found = json.loads(carrel("doctor", "--store", redis_url, "--json", env=OFFLINE).stdout)
    assert found["redis"]["in_force"]


def test_it_fits_a_terminal_of_80_columns(at_terminal: Any) -> None:
    terminal = at_terminal("doctor", *NO_REDIS, columns=80, env=OFFLINE)
    terminal.end()
    assert [line for line in terminal.shown.splitlines() if len(line) > 100] == []


def test_without_namespaces_doctor_and_a_required_sandbox_end_with_3() -> None:
    """In a user namespace of its own, namespaces can be forbidden as some machines do."""
    script = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "
    script += f"--no-new-privs {shlex.quote(sys.executable)} -m carrel "
    for words, message in (("doctor", "No sandbox is possible"), ("run --sandbox required 1", "a sandbox is required")):
        command = ["unshare", "--user", "--map-root-user", "sh", "-c", script + words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3, done.stdout + done.stderr
        assert message in done.stdout + done.stderr
