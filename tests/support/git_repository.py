"""Real git repositories for the tests."""

import os
import subprocess
from pathlib import Path


class Repository:
    """Each commit is a minute after the one before."""

    def __init__(self, folder: Path, *init: str) -> None:
        self.folder = folder
        self.minute = 0
        self.base = self.future = self.loose = ""
        folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "trunk", *init)

    @classmethod
    def at(cls, folder: Path) -> "Repository":
        """One that is there already."""
        here = cls.__new__(cls)
        here.folder, here.minute = folder, 1000
        return here

    def git(self, *words: str, code: int = 0) -> str:
        self.minute += 1
        moment = f"{1_700_000_000 + 60 * self.minute} +0000"
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {
            "GIT_AUTHOR_DATE": moment,
            "GIT_COMMITTER_DATE": moment,
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "protocol.file.allow=always"]
        done = subprocess.run(["git", *identity, *words], cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout.strip()

    def commit(self, message: str, files: dict[str, str] | None = None) -> str:
        for name, text in (files or {}).items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")

    def every_object(self) -> list[str]:
        return self.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
