"""The earlier name of test_architecture.py."""

from tests.test_architecture import *  # noqa: F403
