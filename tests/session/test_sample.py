"""A task session is a session: code, commands, tools and the conversation, in a sample's place, with a verdict."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from carrel import ConfigurationError, SampleNotFound, Session


async def test_work_on_a_sample_and_verify(tmp_path: Path) -> None:
    async with Session.for_sample("demo", "calc-1", cache=tmp_path) as session:
        assert (await session.execute_command("ls")).stdout.split()
        assert (await session.run("import os\nos.path.exists('calc.py')")).value in (True, False)
        assert not (await session.verify()).is_success
        assert session.sample
        applied = await session.execute_command("git apply -", stdin=session.sample.patch)
        assert applied.success, applied.stderr
        verdict = await session.verify()
        assert verdict.is_success, verdict
        session.register_tool(lambda: 7, name="seven")
        assert (await session.run("tools.seven()")).value == 7
        assert session.receipt is not None


async def test_a_session_expires_but_not_during_a_verification(tmp_path: Path) -> None:
    session = Session.for_sample("demo", "calc-1", cache=tmp_path, ttl_minutes=2 / 60)
    await session.start()
    verdict = asyncio.create_task(session.verify())
    assert (await verdict).outcome in ("not_solved", "partly")
    for _ in range(1200):
        if (error := (await session.run("1")).error) is not None:
            break
        await asyncio.sleep(0.05)
    assert error == "Session is closed"


async def test_a_session_without_a_sample_cannot_be_verified(tmp_path: Path) -> None:
    async with Session.inprocess(tmp_path) as session:
        assert session.sample is None
        with pytest.raises(ConfigurationError, match="was not created from a sample, so it cannot be verified"):
            await session.verify()


def test_an_unknown_sample() -> None:
    with pytest.raises(SampleNotFound, match="calc-1"):
        Session.for_sample("demo", "nothing")


@pytest.mark.parametrize("minutes", [-1, 0, float("nan"), "5", True])
def test_a_wrong_ttl_is_refused(minutes: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ttl_minutes is .*; it is a number of minutes above 0"):
        Session.for_sample("demo", "calc-1", ttl_minutes=minutes)
