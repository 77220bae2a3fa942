"""Source that stops all processes of its sandbox is judged in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.tasks.verification.verifier import verify
from tests.support.samples import COMMAND, calc
from tests.tasks.conftest import OpenSample

STOP = {
    "once": "import os, signal, time\nos.kill(-1, signal.SIGSTOP)\ntime.sleep(600)\n",
    "from a child": "import subprocess, time\nsubprocess.run(['sh', '-c', 'kill -STOP -1'])\ntime.sleep(600)\n",
    "for ever": "import os, signal\nwhile True: os.kill(-1, signal.SIGSTOP)\n",
}


@pytest.mark.parametrize("how", STOP)
async def test_source_that_stops_all_processes(how: str, tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = calc(tmp_path / "calc", verify={"command": COMMAND, "timeout": 4})
    executor = await open_sample(sample)
    await executor.write_file("calc.py", STOP[how])
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "tests_did_not_run", result
    assert "did not end within 4 s" in str(result)
    # The agent's own sandbox is stopped by its command, and works afterwards.
    own = await executor.exec("python -c 'import calc'", timeout=2)
    assert (own.exit_code, own.timed_out) == (124, True)
    assert (await verify(sample, executor, cache=cache)).outcome == "tests_did_not_run"
