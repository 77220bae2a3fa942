"""What a zygote imports before the first session: shared by all, and without a thread left running."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from carrel.guest.channel import ChannelClosed
from tests.sandbox.conftest import python_for
from tests.sandbox.host import Session, Zygote

ROLLUP = "answer = [int(l.split()[1]) for l in open('/proc/self/smaps_rollup') if l.startswith('Private')]"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """With numpy, whose linear algebra has a pool of threads, and with a module that is not there."""
    made = Zygote(preload=["numpy", "no_such_module"])
    yield made
    made.close()


@pytest.fixture
def session(zygote: Zygote) -> Iterator[Session]:
    made = Session(zygote, {"readonly": python_for(None)[1]})
    yield made
    made.close()


def test_a_module_that_cannot_be_loaded_is_reported(zygote: Zygote) -> None:
    assert list(zygote.ready["preload_failures"]) == ["no_such_module"]
    assert "ModuleNotFoundError" in zygote.ready["preload_failures"]["no_such_module"]


def test_the_zygote_has_one_thread(zygote: Zygote) -> None:
    assert len(os.listdir(f"/proc/{zygote.ready['pid']}/task")) == 1


def test_numpy_is_there_and_works(session: Session) -> None:
    assert session.value("import sys; answer = 'numpy' in sys.modules") is True
    code = "import numpy as n; a = n.ones((400, 400)); answer = [float((a @ a).sum()), float(n.linalg.det(n.eye(50)))]"
    assert session.value(code) == [400.0**3, 1.0]


def test_memory_is_shared(session: Session) -> None:
    """An idle session owns few of its pages; the rest are the zygote's."""
    assert sum(session.value(ROLLUP)) < 6 * 1024


def test_killing_the_zygote_by_its_number_ends_it(zygote: Zygote) -> None:
    """Also where it had to leave threads behind and is a child of the process that was started."""
    other = Zygote(preload=["numpy"])
    os.kill(other.pid, 9)
    os.waitpid(other.pid, 0)
    with pytest.raises(ChannelClosed):
        other.control.read()
    other.control.close()
