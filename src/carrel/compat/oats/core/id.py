"""Ids."""

from uuid import uuid4


def generate_id() -> str:
    return str(uuid4())


def generate_short_id() -> str:
    """Return 8 characters."""
    return generate_id()[:8]
