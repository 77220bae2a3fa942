"""The version of carrel."""

__version__ = "0.2.0"
