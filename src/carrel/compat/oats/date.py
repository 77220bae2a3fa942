"""The clock of oats."""

from carrel.conversation.models.info import now as utc

__all__ = ["utc"]
