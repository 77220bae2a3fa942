"""The program that a container starts: `python3 -I FOLDER`, in which this lies beside the folder `carrel_guest`."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    contained = importlib.import_module("carrel_guest.worker.contained")
    del sys.path[0]  # the folder itself: code finds nothing of it by name
    contained.main()


if __name__ == "__main__":
    main()
