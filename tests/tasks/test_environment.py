"""The environment of a sample: prepared once, opened often, and clear errors when it cannot be prepared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import EnvironmentFailed, SetupFailed
from carrel.execution.subprocess_executor import SubprocessExecutor
from carrel.tasks.environment import prepare_sample
from carrel.tasks.sample import VerifySettings
from carrel.tasks.verification.changes import Changes
from carrel.tasks.verification.verifier import grade, verify
from tests.support.samples import PYTEST_ENV, SOLVE, calc
from tests.tasks.conftest import OpenSample


def with_place(folder: Path, **environment: Any) -> Any:
    return calc(folder / "calc", environment={"env": PYTEST_ENV, **environment})


async def test_a_place_begins_with_the_samples_files_and_leaves_them_alone(
    tmp_path: Path, open_sample: OpenSample
) -> None:
    sample = calc(tmp_path / "calc")
    first, second = await open_sample(sample), await open_sample(sample)
    await first.exec("rm -r tests; echo changed > calc.py")
    assert (await second.exec("pwd; ls")).stdout == "/workspace\ncalc.py\ntests\n"
    assert "a - b" in (await second.read_file("calc.py")).decode()
    assert "a - b" in (tmp_path / "calc" / "calc.py").read_text()


async def test_the_place_is_as_the_sample_says(tmp_path: Path, open_sample: OpenSample) -> None:
    sample = with_place(
        tmp_path, workdir="/testbed", env={"COLOR": "blue"}, limits={"memory": "300MiB", "processes": 50}
    )
    executor = await open_sample(sample, env={"MORE": "yes"})
    assert (
        await executor.exec("pwd; echo $COLOR $MORE; ls /sys/class/net 2> /dev/null; cat calc.py | head -1")
    ).stdout == ("/testbed\nblue yes\ndef add(a, b):\n")
    assert {"network_isolation", "memory_limit"} <= executor.supported_capabilities()
    assert executor.config.limits.processes == 50


async def test_the_network_is_off_unless_the_sample_or_who_opens_it_says_otherwise(
    tmp_path: Path, open_sample: OpenSample
) -> None:
    off = with_place(tmp_path / "off")
    assert "network_isolation" in (await open_sample(off)).supported_capabilities()
    assert "network_isolation" not in (await open_sample(off, network=True)).supported_capabilities()
    on = with_place(tmp_path / "on", network=True)
    assert "network_isolation" not in (await open_sample(on)).supported_capabilities()


async def test_set_up_runs_once_and_is_shared(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    setup = ["date +%s%N > made.txt; echo prepared", "mkdir built && cp calc.py built/"]
    sample = with_place(tmp_path, setup=setup)
    ready = await asyncio.gather(*(prepare_sample(sample.model_copy(), cache) for _ in range(4)))
    assert {each.workspace for each in ready} == {ready[0].workspace}
    assert ready[0].output.startswith("$ date +%s%N > made.txt; echo prepared\nprepared\n")
    first, second = await open_sample(sample), await open_sample(sample)
    assert await first.read_file("made.txt") == await second.read_file("made.txt")
    assert await first.changed_files() == []
    assert sorted(path.suffix for path in (cache / "layers").iterdir()) == ["", ".home", ".json", ".lock", ".used"]


async def test_what_a_set_up_leaves_in_its_home_is_kept_and_shared(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    tool = "cd $HOME; mkdir -p .local/bin; printf '#!/bin/sh\\necho a tool\\n' > .local/bin/it; chmod +x .local/bin/it"
    sample = with_place(tmp_path, setup=[tool, "echo 1 > $HOME/setting; echo 1 > /tmp/passing"])
    first, second = await open_sample(sample), await open_sample(sample)
    assert (await first.exec("it; cat $HOME/setting; ls /tmp/passing")).stdout == "a tool\n1\n"
    await first.exec("echo 2 > $HOME/setting; rm $HOME/.local/bin/it")
    branch = await first.fork()
    try:
        assert (await branch.exec("cat $HOME/setting; ls $HOME/.local/bin; echo 3 > $HOME/setting")).stdout == "2\n"
    finally:
        await branch.close()
    assert (await first.exec("cat $HOME/setting")).stdout == "2\n"
    assert (await second.exec("it; cat $HOME/setting")).stdout == "a tool\n1\n"
    command = "it && test $(cat $HOME/setting) = 1"
    judged = sample.model_copy(
        update={"verify": VerifySettings(command=command), "fail_to_pass": [], "pass_to_pass": []}
    )
    assert (await verify(judged, first, cache=cache)).outcome == "solved"


async def test_a_set_up_that_writes_elsewhere_learns_where_it_can(tmp_path: Path, cache: Path) -> None:
    sample = with_place(tmp_path, setup=["echo hello > /usr/local/bin/it"])
    with pytest.raises(
        SetupFailed, match=r"Read-only file system\n\(a set-up can write to the workdir and to its home"
    ):
        await prepare_sample(sample, cache)


async def test_a_set_up_has_an_environment_to_install_into_that_comes_first_afterwards(
    tmp_path: Path, open_sample: OpenSample
) -> None:
    file = 'printf "def answer(): return 42\\n" > $(python -c "import site; print(site.getsitepackages()[0])")/found.py'
    sample = with_place(tmp_path, setup=["pip --version", file])
    executor = await open_sample(sample)
    words = "python -c 'import sys, found, pytest; print(sys.prefix, found.answer())'; which python pip"
    assert (await executor.exec(words)).stdout == (
        "/home/agent/.venv 42\n/home/agent/.venv/bin/python\n/home/agent/.venv/bin/pip\n"
    )


async def test_a_set_up_that_is_online_knows_certificates_and_no_passwords(
    tmp_path: Path, open_sample: OpenSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.pem").write_text("a certificate\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("HTTPS_PROXY", "http://ada:secret@proxy.example:3128")
    look = 'cat "$SSL_CERT_FILE" > seen; echo "$PIP_INDEX_URL|$HTTPS_PROXY" >> seen'
    online = await open_sample(with_place(tmp_path / "online", setup=[look], setup_network=True))
    assert await online.read_file("seen") == b"a certificate\nhttps://index.example/simple|\n"
    assert (await online.exec('echo "$SSL_CERT_FILE$PIP_INDEX_URL"')).stdout == "\n"
    assert "network_isolation" in online.supported_capabilities()
    offline = await open_sample(with_place(tmp_path / "offline", setup=[f"{look} || true"]))
    assert await offline.read_file("seen") == b"|\n"


async def test_a_set_up_that_lacks_the_network_names_the_setting(tmp_path: Path, cache: Path) -> None:
    sample = with_place(tmp_path, setup=["pip download --retries 0 -i https://index.example/simple no-such-package"])
    with pytest.raises(SetupFailed, match=r"it has no network; environment.setup_network: true"):
        await prepare_sample(sample, cache)


async def test_another_set_up_is_another_layer(tmp_path: Path, open_sample: OpenSample) -> None:
    one, two = with_place(tmp_path, setup=["echo 1 > it"]), with_place(tmp_path, setup=["echo 2 > it"])
    assert await (await open_sample(one)).read_file("it") == b"1\n"
    assert await (await open_sample(two)).read_file("it") == b"2\n"


async def test_a_verdict_sees_what_the_set_up_made(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    files = {"tests/test_calc.py": "def test_add():\n    from built.calc import add\n    assert add(1, 2) == 3\n"}
    executor = {"env": PYTEST_ENV, "setup": ["mkdir built && sed 's/a - b/a + b/' calc.py > built/calc.py"]}
    sample = calc(tmp_path / "calc", files, environment=executor, pass_to_pass=[])
    assert (await grade(sample, Changes(), cache=cache)).outcome == "solved"


async def test_a_set_up_that_fails_is_reported_with_its_output(tmp_path: Path, cache: Path) -> None:
    sample = with_place(tmp_path, setup=["echo first", "echo no compiler here >&2; exit 7", "echo never"])
    with pytest.raises(SetupFailed, match=r"calc-1: set-up command 2 of 3 ended with 7: .*\nno compiler here") as error:
        await prepare_sample(sample, cache)
    assert "first" in error.value.output
    assert "never\n" not in error.value.output
    assert [path for path in (cache / "layers").iterdir() if path.is_dir()] == []
    result = await grade(sample, Changes(), cache=cache)
    assert result.outcome == "infrastructure_failed"
    assert "no compiler here" in result.evidence[0]


async def test_a_set_up_that_hangs_is_ended(tmp_path: Path, cache: Path) -> None:
    sample = with_place(tmp_path, setup=["echo waiting; sleep 1000"], setup_timeout=2)
    with pytest.raises(SetupFailed, match="took too long: echo waiting; sleep 1000\nwaiting"):
        await prepare_sample(sample, cache)


async def test_a_set_up_that_was_cut_off_is_begun_again(tmp_path: Path, cache: Path) -> None:
    sample = with_place(tmp_path, setup=["echo done > it"])
    ready = await prepare_sample(sample, cache)
    ready.workspace.with_suffix(".json").unlink()
    (ready.workspace / "it").write_text("half")
    again = await prepare_sample(sample, cache)
    assert (again.workspace / "it").read_text() == "done\n"


async def test_packages_that_cannot_be_installed_are_reported(tmp_path: Path, cache: Path) -> None:
    sample = with_place(tmp_path, deps=["./no-such-folder"])
    with pytest.raises(EnvironmentFailed):
        await prepare_sample(sample, cache)


async def test_programs_that_this_machine_lacks_are_reported(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="calc-1 needs no-such-program"):
        await prepare_sample(with_place(tmp_path, programs=["no-such-program"]), cache)


async def test_a_mode_a_link_and_a_deletion_are_carried_over(
    tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    check = "test -x run.sh && test ! -e calc.py && test -L here && ./run.sh && cat here/x && test ! -e gone"
    files = {"run.sh": "echo ran\n", "gone/a.txt": "a", "data/x": "x\n"}
    sample = calc(
        tmp_path / "calc", files, fail_to_pass=[], pass_to_pass=[], verify={"command": check}, patch="+++ b/run.sh\n"
    )
    executor = await open_sample(sample)
    assert (await verify(sample, executor, cache=cache)).outcome == "not_solved"
    await executor.exec("chmod +x run.sh; rm -r calc.py gone; ln -s data here; printf '\\0\\377' > binary")
    result = await verify(sample, executor, cache=cache)
    assert result.outcome == "solved", result
    assert set(result.carried_over) == {"binary", "calc.py", "gone/a.txt", "here", "run.sh"}


async def test_nothing_is_left_when_a_place_is_closed(tmp_path: Path, open_sample: OpenSample, cache: Path) -> None:
    sample = calc(tmp_path / "calc")
    executor = await open_sample(sample)
    await executor.exec(f"{SOLVE}; sleep 1000 > /dev/null 2>&1 &")
    assert (await verify(sample, executor, cache=cache)).is_success
    await executor.close()
    assert [path.name for path in cache.iterdir() if "half" in path.name or "tmp" in path.name] == []


CHANGE_ALL = """
rm gone.txt; echo more >> calc.py; touch tests/test_calc.py; chmod +x data/x; mkdir -p new/deep; echo 1 > new/deep/a
ln -s data link; mv data/y data/z; rm -r deep; mkdir deep; echo new > deep/now; rm -r whole; echo 1 > whole;
rm turned; mkdir turned; echo 2 > turned/inner; mkdir moved; mv lib/* moved/; rm -r lib; chmod 700 kept; rm -r bare
printf same > same.txt; touch -d '2020-01-01' same.txt; echo 2 > '-n ew'
"""


@pytest.mark.parametrize("odd", ["", "echo 3 > $(printf 'odd\\nname')", "echo 4 > $(printf 'odd\\377name')"])
async def test_one_look_at_a_place_finds_what_many_find(
    odd: str, tmp_path: Path, open_sample: OpenSample, cache: Path
) -> None:
    files = {"gone.txt": "", "data/x": "x", "data/y": "y", "same.txt": "same", "deep/er/file": "f"}
    files |= {"whole/a": "a", "whole/b/c": "c", "turned": "t", "lib/x.py": "x", "kept/k": "k", "bare/one": "1"}
    sample = calc(tmp_path / "calc", files)
    executor = await open_sample(sample)
    base = (await prepare_sample(sample, cache)).workspace
    assert await executor.changed_files() == []
    await executor.exec(CHANGE_ALL + odd)
    found = await executor.changed_files()
    assert isinstance(executor, SubprocessExecutor)
    upper = await executor.upper(base)
    assert (upper is None) == ("377" in odd)
    assert upper is None or "deep/er/file" in upper.hidden
    assert {"gone.txt", "calc.py", "data/x", "data/y", "data/z", "link", "new/deep/a", "-n ew"} <= {
        c.path for c in found
    }
    assert not {"tests/test_calc.py", "same.txt"} & {change.path for change in found}
