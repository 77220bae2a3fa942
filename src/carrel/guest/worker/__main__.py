"""The program that a container starts: `python3 -I FOLDER`, where this file is beside the folder `carrel_guest`."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    container_init = importlib.import_module("carrel_guest.worker.container_init")
    del sys.path[0]  # the folder itself: code must not find anything in it by name
    container_init.serve_container()


if __name__ == "__main__":
    main()
