"""What the first process of a container forks: the worker, and who unpacks files of the host."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tarfile
import traceback
from typing import Any

from .. import syscalls
from .main import run


def _as_usual() -> None:
    """In a child: signals as a program finds them."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def become_worker(line: int, ends: tuple[int, ...], environment: dict[str, str], settings: dict[str, Any]) -> None:
    try:
        _as_usual()
        os.setsid()
        syscalls.set_dumpable(True)
        nothing = os.open("/dev/null", os.O_RDONLY)
        for source, number in ((nothing, 0), (ends[0], 1), (ends[1], 2)):
            os.dup2(source, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != line:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(int(name))
        os.environ.update(environment)
        os.umask(0o022)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")  # When memory runs out, the session's own processes go before this one.
        os.chdir(str(settings["home"]))
        gc.collect()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except BaseException:  # noqa: BLE001 - told where the session's output goes, then the end
        traceback.print_exc()
        os._exit(70)
    run(line, -1, settings)


def become_unpacker(source: int, at: str, remove: list[str]) -> None:
    code = 1
    try:
        _as_usual()
        os.makedirs(at, exist_ok=True)
        for name in remove:
            path = os.path.join(at, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
        with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
            # What the host sends is taken as it is; older Pythons have no word for that.
            trusted: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(at, **trusted)
        code = 0
    except BaseException:  # noqa: BLE001 - told to the host, over the container's own standard error
        traceback.print_exc()
    finally:
        os._exit(code)
