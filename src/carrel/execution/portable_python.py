"""This machine's own Python as an archive, for containers whose image has none that can run the worker's program."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import carrel.guest
from carrel.errors import SandboxUnavailable

GUEST = Path(carrel.guest.__file__).parent
_LIBRARIES = "python/libraries"
_LIST_MODULES = """
import importlib, json, os, pkgutil, sys
sys.path.insert(0, sys.argv[1])
importlib.import_module(f"{sys.argv[2]}.worker.container_init")
import encodings, grp, pwd, tarfile
files = [(module.__file__, getattr(module.__spec__, "cached", None)) for module in sys.modules.values()
         if getattr(module, "__file__", None) and module.__name__ != "__main__" and module.__spec__ is not None]
for module in pkgutil.iter_modules(encodings.__path__):
    spec = importlib.util.find_spec(f"encodings.{module.name}")
    files.append((spec.origin, spec.cached))
print(json.dumps([sys.base_prefix, files]))
"""
"""Lists the files of all modules that the first process and the command server need, with their bytecode."""


@functools.cache
def portable_python() -> tuple[tuple[str, ...], bytes]:
    """The paths of the loader, of its libraries and of the program in the archive, and the archive.

    It brings the loader and the shared libraries, so the image needs nothing but the same processor. Only modules that
    commands and files need are in it, 10 to 30 MB."""
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LIST_MODULES, str(GUEST.parent), GUEST.name],
        capture_output=True,
        check=True,
        text=True,
    )
    prefix, files = json.loads(listed.stdout)
    modules = {origin: cached for origin, cached in files if Path(origin).is_relative_to(prefix)}
    program = os.path.realpath(sys.executable)
    libraries, loader = shared_libraries([program, *(path for path in modules if path.endswith(".so"))])
    with io.BytesIO() as out, tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
        for origin, cached in sorted(modules.items()):
            name = f"python/{os.path.relpath(origin, prefix)}"
            if cached is not None and os.path.exists(cached):
                # Bytecode in the place of the source needs no check against it.
                archive.add(cached, f"{name.removesuffix('.py')}.pyc", filter=_of_root)
            else:
                archive.add(origin, name, filter=_of_root)
        for path in sorted(libraries | {loader}):
            archive.add(path, f"{_LIBRARIES}/{os.path.basename(path)}", filter=_of_root)
        archive.add(program, "python/bin/python3", filter=_of_root)
        end = archive.offset + 2 * tarfile.BLOCKSIZE
        archive.close()
        return (f"{_LIBRARIES}/{os.path.basename(loader)}", _LIBRARIES, "python/bin/python3"), out.getvalue()[
            :end
        ]  # Podman does not read the padding that Python adds.


def shared_libraries(programs: list[str]) -> tuple[set[str], str]:
    """The shared libraries of programs and the loader, as this machine's `ldd` finds them."""
    try:
        listed = subprocess.run(["ldd", *programs], capture_output=True, check=False, text=True).stdout
    except FileNotFoundError:
        raise SandboxUnavailable("the program ldd is missing, which lists the libraries that Python needs") from None
    found = {path for path in re.findall(r"=> (/\S+)", listed) if os.path.exists(path)}
    loader = re.search(r"^\s+(/\S+)(?: =>.*)? \(0x", listed, re.MULTILINE)
    if loader is None:
        raise SandboxUnavailable("ldd names no loader for the Python of this machine")
    return found - {loader[1]}, loader[1]


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owned by root, and readable and executable for all users."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755
    return entry
