"""Starts workers as the sandbox does: their folder loaded by path, in whatever Python runs this file; then it forks."""

import importlib.util
import json
import os
import socket
import sys


def load(name, file):
    folder = os.path.dirname(file) if file.endswith("__init__.py") else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder and [folder])
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


here, guest, fork_socket = os.path.dirname(os.path.abspath(__file__)), sys.argv[1], int(sys.argv[2])
load("carrel_guest", guest + "/__init__.py")
entries = {name: importlib.import_module(f"carrel_guest.worker.{name}") for name in ("main", "command_server")}
begun = load("fork_server", here + "/../../support/fork_server.py").serve(socket.socket(fileno=fork_socket))
if begun is not None:
    (entry, settings), (line,) = begun
    entries[entry].run(line, -1, json.loads(settings))
