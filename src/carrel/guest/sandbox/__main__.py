"""The zygote's program, run by its path in the Python of a session: `python -I …/sandbox/__main__.py`.

It loads the guest package under the name `carrel_guest` and serves the control socket, which is descriptor 3. With the
argument `probe` it tries each part of the sandbox instead, and prints the results.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

PACKAGE = "carrel_guest"
# Sessions are copies of this process, its first environment included (/proc/self/environ): no secret may be in it.
KEPT_VARIABLES = frozenset({"LANG", "LC_ALL", "LC_CTYPE", "PATH", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "TZ"})


def load_package(folder: str, package: str) -> None:
    """Make a folder importable as a package of this name, without installing it or changing sys.path."""
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(package, file, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded as the package {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)


def main() -> None:
    if not set(os.environ) <= KEPT_VARIABLES:
        kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
        os.execve(sys.executable, [sys.executable, "-I", os.path.abspath(__file__), *sys.argv[1:]], kept)
    load_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), PACKAGE)
    # The current folder might be one that a session's own /tmp covers, and hold up its overlay.
    os.chdir("/")
    if sys.argv[1:] == ["probe"]:
        importlib.import_module(PACKAGE + ".sandbox.probe_child").main()
    else:
        importlib.import_module(PACKAGE + ".sandbox.zygote").serve(3)


if __name__ == "__main__":
    main()
