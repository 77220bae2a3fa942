"""`scripts/bootstrap` finds a Python, also where paths have spaces."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
PROGRAMS = ("sh", "dirname", "cat", "cksum", "grep")


def test_a_python_of_pyenv_in_a_home_folder_with_a_space(tmp_path: Path) -> None:
    clone, home, programs = (tmp_path / name for name in ("a clone", "a home", "programs"))
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(HERE / "scripts" / "bootstrap", clone / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(HERE / name, clone)
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).symlink_to(str(shutil.which(name)))
    python = home / ".pyenv" / "versions" / "3.11.9" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    # A real one, which stops before it makes an environment.
    python.write_text(
        '#!/bin/sh\n[ "$2" != venv ] || exit 9\n'
        f'exec {shlex.quote(os.path.realpath(sys.executable))} "$@"\n'
    )  # fmt: skip
    python.chmod(0o755)
    only = {"HOME": str(home), "PATH": str(programs)}
    run = subprocess.run(["sh", clone / "scripts" / "bootstrap"], env=only, capture_output=True, text=True, check=False)
    assert (run.returncode, f"taking {python} instead" in run.stderr) == (9, True), run.stderr
