"""Python runs this in every program that code starts as a command, and so that has the session's packages.

They come behind the standard library, as they do for the code itself: a package may hold a module that is called like
one of Python's own. It lies in a folder that is called as that of the packages, with `.path` after it.
"""

import importlib
import os
import site
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_packages = _here[: -len(".path")]


def _add() -> None:
    own = [place for place, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages"))]
    if _packages not in sys.path:
        sys.path.insert(own[0] if own else len(sys.path), _packages)
    try:
        site.addsitedir(_packages)  # it is on the path already: this reads the `.pth` files of its packages
    except SystemExit:
        sys.stderr.write(f"a .pth file in {_packages} wanted to end Python\n")


def _next() -> None:
    """The one that would have been run without this one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _here]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        pass
    finally:
        sys.modules.setdefault("sitecustomize", this)


_add()
_next()
