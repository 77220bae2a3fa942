"""The program `carrel`, and `python -m carrel`: its first step, before anything is loaded."""

import signal
import sys
from importlib import import_module


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    # Nothing has begun yet that would have to be ended in order: Ctrl-C ends the process at once, and without a word.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code: int = import_module("carrel.cli").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
