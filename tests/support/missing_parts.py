"""What a test does when a part it needs, such as a program, is missing on this machine."""

import os
from typing import NoReturn

import pytest

SETTING = "CARREL_TESTS_NEED"


def skip_without(reason: str) -> NoReturn:
    """Skip the test, or fail it when CARREL_TESTS_NEED=all says that nothing may be missing.

    For parts that can be installed. What this kind of machine or an ordinary user cannot do is a plain `pytest.skip`.
    """
    if os.environ.get(SETTING) == "all":
        pytest.fail(f"{reason} ({SETTING}=all: no part may be missing)", pytrace=False)
    pytest.skip(reason)
