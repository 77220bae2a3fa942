"""Workflows: Python files with a function `run`, saved once and called by name."""

from carrel.library.workflows.library import WorkflowLibrary

__all__ = ["WorkflowLibrary"]
