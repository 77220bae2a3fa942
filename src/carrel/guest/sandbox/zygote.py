"""Started by path in a session's own Python: `python -I zygote.py`, with the control socket as descriptor 3."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

PACKAGE = "carrel_guest"
# A session is a copy of this process, its first environment included (/proc/self/environ): nothing secret may be in it.
KEPT = frozenset({"LANG", "LC_ALL", "LC_CTYPE", "PATH", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "TZ"})


def load_folder(folder: str, package: str) -> None:
    """Make a folder importable as a package of this name, without it being installed or on the path."""
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(package, file, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded as the package {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)


def main() -> None:
    if not set(os.environ) <= KEPT:
        kept = {name: value for name, value in os.environ.items() if name in KEPT}
        os.execve(sys.executable, [sys.executable, "-I", os.path.abspath(__file__), *sys.argv[1:]], kept)
    load_folder(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), PACKAGE)
    # A folder that a session's own /tmp covers later would be in the way of its overlay.
    os.chdir("/")
    if sys.argv[1:] == ["trying"]:
        importlib.import_module(PACKAGE + ".sandbox.trying").main()
    else:
        importlib.import_module(PACKAGE + ".sandbox.spawning").serve(3)


if __name__ == "__main__":
    main()
