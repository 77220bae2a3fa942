"""The old name of `carrel.library.dependencies`, for one release."""

from carrel.library.dependencies import Dependencies as Deps
from carrel.library.dependencies import Installer

__all__ = ["Deps", "Installer"]
