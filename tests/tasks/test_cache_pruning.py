"""Pruning removes unused files from the cache, and nothing that another process uses."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from carrel.tasks import file_cache
from carrel.tasks.environment import PreparedSample, open_executor, prepare_sample
from carrel.tasks.file_cache import archive_of, prune
from carrel.tasks.sample import Sample
from tests.cli.conftest import carrel, environment, home  # noqa: F401 -- fixtures
from tests.support.samples import written

# ruff: noqa: F811 -- a fixture's name is also that of the argument

USER = """
import asyncio, sys, time
from pathlib import Path
from carrel.tasks.environment import prepare_sample
from carrel.tasks.sample import Sample

async def main():
    sample = Sample(sample_id="a", files=Path(sys.argv[1]), environment={"setup": ["echo 1 > it"]})
    ready = await prepare_sample(sample, Path(sys.argv[2]))
    print("ready", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def made(tmp_path: Path, name: str = "a", *setup: str) -> Sample:
    files = written(tmp_path / name, {"file.txt": name})
    return Sample(sample_id=name, files=files, environment={"setup": list(setup)})


def names(cache: Path) -> list[str]:
    folders = [path for kind in ("files", "layers") for path in (cache / kind).glob("*") if path.is_dir()]
    return sorted(path.parent.name for path in folders if path.name != "digests")


async def test_what_is_used_stays_and_what_is_not_goes(tmp_path: Path, cache: Path) -> None:
    ready: PreparedSample | None = await prepare_sample(made(tmp_path, "a", "echo 1 > it; echo 2 > $HOME/own"), cache)
    await prepare_sample(made(tmp_path, "b"), cache)
    gc.collect()
    assert names(cache) == ["files", "files", "layers", "layers"]
    done = prune(cache, time.time() + 1, dry_run=True)
    assert (len(done.removed), done.in_use) == (1, 2)
    assert names(cache) == ["files", "files", "layers", "layers"]
    done = prune(cache, time.time() + 1)
    assert (len(done.removed), done.in_use, done.bytes) == (1, 2, done.removed[0].bytes)
    assert names(cache) == ["files", "layers", "layers"]
    assert ready is not None
    executor = await open_executor(ready)
    ready = None
    gc.collect()
    assert prune(cache, time.time() + 1).in_use == 2
    assert (await executor.exec("cat file.txt it $HOME/own")).stdout == "a1\n2\n"
    await executor.close()
    del executor
    gc.collect()
    done = prune(cache, time.time() + 1)
    assert (len(done.removed), done.in_use, names(cache)) == (2, 0, [])
    again = await prepare_sample(made(tmp_path, "a", "echo 1 > it; echo 2 > $HOME/own"), cache)
    assert (again.workspace / "it").read_text() == "1\n"


async def test_what_was_used_lately_stays(tmp_path: Path, cache: Path) -> None:
    await prepare_sample(made(tmp_path), cache)
    gc.collect()
    done = prune(cache, time.time() - 60)
    assert (done.removed, done.kept) == ([], 1)


def test_what_another_process_uses_stays_until_it_is_gone(tmp_path: Path, cache: Path) -> None:
    files = written(tmp_path / "a", {"file.txt": "a"})
    words = [sys.executable, "-c", USER, str(files), str(cache)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as user:
        try:
            assert user.stdout is not None
            assert user.stdout.readline() == "ready\n"
            done = prune(cache, time.time() + 1)
            assert (done.removed, done.in_use) == ([], 2)
        finally:
            user.send_signal(signal.SIGKILL)
    assert len(prune(cache, time.time() + 1).removed) == 2


async def test_what_a_killed_prune_left_is_removed(tmp_path: Path, cache: Path) -> None:
    await prepare_sample(made(tmp_path), cache)
    left = cache / "files" / "0123.99.gone"
    left.mkdir()
    (left / "x").write_text("x")
    prune(cache, 0)
    assert not left.exists()


@pytest.mark.usefixtures("environment")
def test_the_command(carrel: object, home: Path) -> None:
    assert callable(carrel)
    carrel("task", "verify", "demo", "calc-1", "--gold")
    assert "0 removed" in carrel("datasets", "prune").stdout
    for used in (home / "cache" / "files").glob("*.used"):
        os.utime(used, (0, 0))
    assert "1 would be removed" in carrel("datasets", "prune", "--dry-run").stdout
    answer = json.loads(carrel("datasets", "prune", "--older-than", "12h", "--json").stdout)
    assert (len(answer["removed"]), answer["in_use"], answer["dry_run"]) == (1, 0, False)
    assert carrel("task", "verify", "demo", "calc-1", "--gold").stdout.startswith("solved")


async def test_files_that_another_prune_removes_are_counted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        await prepare_sample(made(tmp_path, name), cache)
    gc.collect()
    others = []
    measured = file_cache._size

    def slowly(folder: Path) -> int:
        monkeypatch.setattr(file_cache, "_size", measured)
        others.append(prune(cache, time.time() + 60))
        return measured(folder)

    monkeypatch.setattr(file_cache, "_size", slowly)
    done = prune(cache, time.time() + 60)
    assert [len(each.removed) for each in (*others, done)] == [3, 0]
    assert names(cache) == []


async def test_an_archive_for_download_goes_when_it_was_not_used_for_long(tmp_path: Path, cache: Path) -> None:
    sample = made(tmp_path, "a")
    archive = await archive_of(sample, cache)
    os.utime(archive, (1, 1))
    assert await archive_of(sample, cache) == archive, "it is used again now"
    assert [each.name for each in prune(cache, time.time() - 60).removed] == []
    os.utime(archive, (1, 1))
    assert [each.name for each in prune(cache, time.time() - 60, dry_run=True).removed] == [f"downloads/{archive.name}"]
    [removed] = prune(cache, time.time() - 60).removed
    assert removed.bytes > 0
    assert list((cache / "downloads").iterdir()) == []
    assert (await archive_of(sample, cache)).is_file()


async def test_no_record_of_removed_files_is_left(tmp_path: Path, cache: Path) -> None:
    sample = made(tmp_path, "a", "echo 1 > it")
    os.utime(tmp_path / "a" / "file.txt", (1, 1))
    await prepare_sample(sample, cache)
    digest = cache / "files" / "digests" / "of-a-source.json"
    digest.parent.mkdir(exist_ok=True)
    digest.write_text("{}")
    gc.collect()
    prune(cache, time.time() - 60)
    assert digest.exists(), "it is not old enough"
    prune(cache, time.time() + 1)
    left = [path for kind in ("files", "layers") for path in (cache / kind).rglob("*") if path.is_file()]
    assert left == []


def test_a_lease_that_waits_for_a_prune_is_on_the_new_lock_file(tmp_path: Path) -> None:
    folder = tmp_path / "files" / "f"
    folder.mkdir(parents=True)
    leases: list[file_cache.CacheLease] = []
    with file_cache.exclusive(folder) as free:
        assert free
        waiting = threading.Thread(target=lambda: leases.append(file_cache.CacheLease(folder)))
        waiting.start()
        while not Path("/proc/locks").read_text().count("->"):
            time.sleep(0.01)
        file_cache._remove_locks(folder)
    waiting.join(30)
    assert folder.with_suffix(".used").exists()
    with file_cache.exclusive(folder) as free:
        assert not free
