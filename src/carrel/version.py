"""The version of carrel."""

__version__ = "0.1.0"
