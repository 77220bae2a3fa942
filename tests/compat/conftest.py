"""Fixtures for the tests of the compatibility modules."""

from tests.client.conftest import server

__all__ = ["server"]
