"""Starts a worker as the sandbox does: its folder loaded by path, in whatever Python runs this file."""

import importlib.util
import json
import sys

folder, line, init, settings = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
spec = importlib.util.spec_from_file_location(
    "carrel_worker", folder + "/__init__.py", submodule_search_locations=[folder]
)
package = importlib.util.module_from_spec(spec)
sys.modules["carrel_worker"] = package
spec.loader.exec_module(package)
importlib.import_module("carrel_worker.main").run(line, init, settings)
