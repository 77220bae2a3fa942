"""A private Postgres for the tests: a real server on a free loopback port, gone with the test run."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

from tests.support.ports import free_port
from tests.support.real_redis import die_with_parent


class NoPostgres(Exception):
    """There is no Postgres here and it cannot be installed; the message says why."""


def find_postgres() -> Path:
    """Return the folder of Postgres's programs, installed with apt when it is missing and this user may."""
    if found := _installed():
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NoPostgres("postgres is not installed, and only root with apt-get can install it here")
    with open(Path(tempfile.gettempdir()) / "carrel-tests-apt.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # several test workers may find out at the same time
        if not _installed():
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in ("apt-get update -qq", "apt-get install -y -qq --no-install-recommends postgresql"):
                done = subprocess.run(command.split(), env=quiet, capture_output=True, text=True)
            if done.returncode != 0:
                raise NoPostgres(f"`{command}` failed: {done.stderr.strip()[-300:]}")
    found = _installed()
    if found is None:
        raise NoPostgres("apt-get installed no Postgres")
    return found


def _installed() -> Path | None:
    if program := shutil.which("initdb"):
        return Path(program).resolve().parent
    folders = [folder for folder in Path("/usr/lib/postgresql").glob("*/bin") if (folder / "initdb").exists()]
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


class RealPostgres:
    """A server process with the user `carrel` and the database `postgres`; `settings` are of postgresql.conf."""

    def __init__(self, **settings: str) -> None:
        self._programs = find_postgres()
        self._settings = {
            "max_connections": "400",
            "fsync": "off",
            "dynamic_shared_memory_type": "mmap",
            "unix_socket_directories": "",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None
        # It refuses to run as root, and no other user can enter pytest's folders.
        self._user = "postgres" if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="carrel-postgres-", dir="/tmp"))
        if self._user:
            shutil.chown(self._folder, self._user)
        command = ["-D", str(self._folder / "data"), "-U", "carrel", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        done = subprocess.run(
            [self._programs / "initdb", *command], user=self._user, cwd="/", capture_output=True, text=True
        )
        if done.returncode != 0:
            raise NoPostgres(f"initdb failed: {done.stderr.strip()[-300:]}")
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"postgresql://carrel@127.0.0.1:{self.port}/postgres"

    def start(self) -> "RealPostgres":
        """Start it and wait until it answers."""
        settings = {**self._settings, "listen_addresses": "127.0.0.1", "port": str(self.port)}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", *words],
                user=self._user, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        while self._process.poll() is None:
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
            except psycopg.OperationalError:
                time.sleep(0.05)  # not listening yet
            else:
                return self
        raise RuntimeError(f"postgres does not start: {(self._folder / 'log').read_text()[-500:]}")

    def kill(self) -> None:
        """End it at once; it recovers at the next start."""
        if self._process:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """End it and delete its data."""
        self.kill()
        shutil.rmtree(self._folder)
