"""A private Redis for the tests: a real server on a free loopback port, gone with the test run."""

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.support.ports import free_port


class NoRedis(Exception):
    """There is no redis-server here and it cannot be installed; the message says why."""


def find_redis() -> str:
    """The path of redis-server, installed with apt when it is missing and this user may."""
    if found := shutil.which("redis-server"):
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NoRedis("redis-server is not in PATH, and only root with apt-get can install it here")
    with open(Path(tempfile.gettempdir()) / "carrel-tests-apt.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # several test workers may find out at the same time
        if not shutil.which("redis-server"):
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in ("apt-get update -qq", "apt-get install -y -qq --no-install-recommends redis-server"):
                done = subprocess.run(command.split(), env=quiet, capture_output=True, text=True)
            if done.returncode != 0:
                raise NoRedis(f"`{command}` failed: {done.stderr.strip()[-300:]}")
    return shutil.which("redis-server") or "redis-server"


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


class RealRedis:
    """One server process. `settings` are redis.conf settings; by default nothing is written to disk."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._binary = find_redis()
        self._folder = folder
        self._settings = {"save": "", "appendonly": "no", **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> "RealRedis":
        """Start it and wait until it answers; the same port again after a `stop`."""
        for _ in range(5):
            port = self.port or free_port()
            if self._started(port):
                self.port = port
                return self
        raise RuntimeError(f"redis-server does not start with {self._settings}: see {self._folder / 'redis.log'}")

    def _started(self, port: int) -> bool:
        command = [self._binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--logfile", str(self._folder / "redis.log"), "--daemonize", "no"]
        for name, value in self._settings.items():
            command += [f"--{name.replace('_', '-')}", *(value.split() or [""])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        while self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
                    line.sendall(b"PING\r\n")
                    if not line.recv(100).startswith(b"-LOADING"):
                        return True
            except OSError:
                pass  # not listening yet
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        """At once, as a power cut would."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """In good order."""
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It is there, takes connections, and answers no request."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)
