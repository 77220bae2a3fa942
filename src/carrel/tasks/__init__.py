"""Tasks: datasets and samples, the place of one sample, the verdict on it, and running many.

The names below load with their first use: the command line reads them only where it needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carrel.tasks.changes import Changes as Changes
    from carrel.tasks.changes import changes_of_folder as changes_of_folder
    from carrel.tasks.checking import Finding as Finding
    from carrel.tasks.checking import check as check
    from carrel.tasks.dataset import Dataset as Dataset
    from carrel.tasks.dataset import Datasets as Datasets
    from carrel.tasks.grading import grade as grade
    from carrel.tasks.grading import grade_patch as grade_patch
    from carrel.tasks.grading import protection_of as protection_of
    from carrel.tasks.grading import verify as verify
    from carrel.tasks.imports.history import import_history as import_history
    from carrel.tasks.imports.swebench import import_swebench as import_swebench
    from carrel.tasks.imports.writing import Imported as Imported
    from carrel.tasks.pass_rate import Summary as Summary
    from carrel.tasks.place import Prepared as Prepared
    from carrel.tasks.place import default_cache as default_cache
    from carrel.tasks.place import make_ready as make_ready
    from carrel.tasks.place import open_place as open_place
    from carrel.tasks.pruning import Pruning as Pruning
    from carrel.tasks.pruning import prune as prune
    from carrel.tasks.results_file import TaskResult as TaskResult
    from carrel.tasks.running import Agent as Agent
    from carrel.tasks.running import run_samples as run_samples
    from carrel.tasks.sample import Sample as Sample
    from carrel.tasks.sample_executor import SampleExecutor as SampleExecutor
    from carrel.tasks.unpacking import Files as Files
    from carrel.tasks.unpacking import Receipt as Receipt
    from carrel.tasks.unpacking import prepared_files as prepared_files
    from carrel.tasks.verdict import VerificationResult as VerificationResult

_FILES = {
    "changes": "Changes changes_of_folder",
    "checking": "Finding check",
    "dataset": "Dataset Datasets",
    "grading": "grade grade_patch protection_of verify",
    "imports.history": "import_history",
    "imports.swebench": "import_swebench",
    "imports.writing": "Imported",
    "pass_rate": "Summary",
    "place": "Prepared default_cache make_ready open_place",
    "pruning": "Pruning prune",
    "results_file": "TaskResult",
    "running": "Agent run_samples",
    "sample": "Sample",
    "sample_executor": "SampleExecutor",
    "unpacking": "Files Receipt prepared_files",
    "verdict": "VerificationResult",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    file = _FILE_OF.get(name)
    if file is None:
        raise AttributeError(f"module 'carrel.tasks' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"carrel.tasks.{file}"), name)
    return value
