"""Tasks: datasets and samples, the environment of a sample, its verification, and running an agent over many of them.

The names below load with their first use, so that the command line reads only the modules that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carrel.tasks.dataset import Dataset as Dataset
    from carrel.tasks.dataset import Datasets as Datasets
    from carrel.tasks.dataset_check import CheckResult as CheckResult
    from carrel.tasks.dataset_check import check as check
    from carrel.tasks.environment import ContainerPool as ContainerPool
    from carrel.tasks.environment import ContainerSampleExecutor as ContainerSampleExecutor
    from carrel.tasks.environment import PreparedSample as PreparedSample
    from carrel.tasks.environment import SampleExecutor as SampleExecutor
    from carrel.tasks.environment import default_cache as default_cache
    from carrel.tasks.environment import open_executor as open_executor
    from carrel.tasks.environment import prepare_sample as prepare_sample
    from carrel.tasks.file_cache import Files as Files
    from carrel.tasks.file_cache import Pruning as Pruning
    from carrel.tasks.file_cache import prepared_files as prepared_files
    from carrel.tasks.file_cache import prune as prune
    from carrel.tasks.images import NeededImage as NeededImage
    from carrel.tasks.images import Pull as Pull
    from carrel.tasks.images import make_images as make_images
    from carrel.tasks.images import needed_images as needed_images
    from carrel.tasks.importers.git_commits import import_history as import_history
    from carrel.tasks.importers.harbor import import_harbor as import_harbor
    from carrel.tasks.importers.swebench import import_swebench as import_swebench
    from carrel.tasks.importers.write import ImportResult as ImportResult
    from carrel.tasks.run_folder import RunFolder as RunFolder
    from carrel.tasks.run_folder import RunInfo as RunInfo
    from carrel.tasks.run_folder import TaskResult as TaskResult
    from carrel.tasks.run_folder import attempts_of as attempts_of
    from carrel.tasks.run_folder import summary_of as summary_of
    from carrel.tasks.runner import Agent as Agent
    from carrel.tasks.runner import AgentOutcome as AgentOutcome
    from carrel.tasks.runner import OpenSession as OpenSession
    from carrel.tasks.runner import TaskSession as TaskSession
    from carrel.tasks.runner import local_sessions as local_sessions
    from carrel.tasks.runner import run_samples as run_samples
    from carrel.tasks.sample import Sample as Sample
    from carrel.tasks.stats import Comparison as Comparison
    from carrel.tasks.stats import Rate as Rate
    from carrel.tasks.stats import Summary as Summary
    from carrel.tasks.stats import compare as compare
    from carrel.tasks.verification.changes import Changes as Changes
    from carrel.tasks.verification.changes import changes_of_folder as changes_of_folder
    from carrel.tasks.verification.verifier import Verifier as Verifier
    from carrel.tasks.verification.verifier import grade as grade
    from carrel.tasks.verification.verifier import grade_patch as grade_patch
    from carrel.tasks.verification.verifier import protection_for as protection_for
    from carrel.tasks.verification.verifier import verify as verify
    from carrel.wire.verification import Receipt as Receipt
    from carrel.wire.verification import VerificationResult as VerificationResult

_MODULES = {
    "dataset": "Dataset Datasets",
    "dataset_check": "CheckResult check",
    "environment": (
        "ContainerPool PreparedSample SampleExecutor ContainerSampleExecutor default_cache prepare_sample open_executor"
        " sample_executor"
    ),
    "file_cache": "Files Pruning Receipt prepared_files prune",
    "images": "NeededImage Pull make_images needed_images",
    "importers.git_commits": "import_history",
    "importers.harbor": "import_harbor",
    "importers.swebench": "import_swebench",
    "importers.write": "ImportResult",
    "run_folder": "RunFolder RunInfo TaskResult attempts_of summary_of",
    "runner": "Agent AgentOutcome OpenSession TaskSession local_sessions run_samples",
    "sample": "Sample",
    "stats": "Comparison Rate Summary compare",
    "verification.changes": "Changes changes_of_folder",
    "verification.verdict": "VerificationResult",
    "verification.verifier": "Verifier grade grade_patch protection_for verify",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

_OLDER_NAMES = {
    "Finding": "CheckResult",
    "Imported": "ImportResult",
    "Prepared": "PreparedSample",
    "make_ready": "prepare_sample",
    "open_place": "open_executor",
    "protection_of": "protection_for",
}
"""Names of 0.4, which stay for one release."""


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(_OLDER_NAMES.get(name, name))
    if module is None:
        raise AttributeError(f"module 'carrel.tasks' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"carrel.tasks.{module}"), _OLDER_NAMES.get(name, name))
    return value
