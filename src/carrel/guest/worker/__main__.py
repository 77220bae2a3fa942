"""The program that a container starts: `python3 -I FOLDER`, where this file is beside the folder `carrel_guest`.

Every Python 3 can read this file: an older one says why it cannot be used."""

import importlib
import sys


def main() -> None:
    if sys.version_info < (3, 9):  # noqa: UP036 -- an image may have any
        sys.exit("no usable Python: it is version " + sys.version.split()[0])
    try:
        container_init = importlib.import_module("carrel_guest.worker.container_init")
    except ImportError as problem:
        sys.exit("no usable Python: " + str(problem))
    del sys.path[0]  # the folder itself: code must not find anything in it by name
    container_init.serve_container()


if __name__ == "__main__":
    main()
