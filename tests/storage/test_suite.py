"""The shared suite, run on memory, files and Redis."""

from tests.storage.suite import *  # noqa: F403
from tests.support.stores import DIFFERENCES as BY_KIND
from tests.support.stores import KINDS


def test_every_difference_between_the_kinds_has_a_reason() -> None:
    assert all(kind in KINDS and len(reason) > 20 for (kind, _), reason in BY_KIND.items())
