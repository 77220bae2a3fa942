"""Loaded by every Python of a test command: where it is `python -m unittest`, its results get a witness."""

import os
import sys

if "CARREL_WITNESS" in os.environ and "unittest" in getattr(sys, "orig_argv", ()):
    import carrel_unittest

    carrel_unittest.attend()
