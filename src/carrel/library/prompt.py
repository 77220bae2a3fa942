"""The description of a session's library for a model: one page, however many tools and workflows there are."""

from collections.abc import Sequence
from typing import Any

from carrel.library.artifacts import ArtifactStore
from carrel.library.dependencies import Dependencies
from carrel.library.tools.registry import ToolRegistry
from carrel.library.workflows import WorkflowLibrary

_INTRODUCTION = """\
Python code runs in a session that keeps its variables between runs; the value of the last expression is returned.
It has four names: `tools` calls functions outside the session, `workflows` holds saved Python functions, `artifacts`
stores data, `deps` installs packages: `deps.add("pandas")`, not pip. A plain call waits and returns its value;
`await NAME.call_async(...)` lets many run at once.
"""
_LEAST = 200
"""Characters that each section may have at least."""


async def library_prompt(
    tools: ToolRegistry,
    workflows: WorkflowLibrary,
    artifacts: ArtifactStore,
    deps: Dependencies,
    task: str | None,
    limit: int,
) -> str:
    """Describe the four namespaces in about `limit` characters; what matches the task comes first."""
    available = limit - len(_INTRODUCTION)
    listed = await workflows.list()
    if task and listed:
        matching = await workflows.search(task, 50)
        names = {workflow["name"] for workflow in matching}
        listed = [*matching, *(workflow for workflow in listed if workflow["name"] not in names)]
    lines = [workflow_line(workflow) for workflow in listed]
    others = section("workflows", lines, "workflows.search(query)", max(available // 4, _LEAST))
    lines = [artifact_line(artifact) for artifact in await artifacts.list()]
    others += section("artifacts", lines, "artifacts.list()", max(available // 10, _LEAST))
    others += section("deps", await deps.list(), "deps.list()", max(available // 20, _LEAST))
    stubs = (await tools.describe(task, max(available - len(others), _LEAST))).rstrip()
    return _INTRODUCTION + (f"\n## tools\n{stubs}\n" if stubs else "") + others


def section(title: str, lines: Sequence[str], list_all: str, limit: int) -> str:
    """Return as many lines as fit, and the call that lists the rest."""
    if not lines:
        return ""
    shown: list[str] = []
    for line in lines:
        limit -= len(line) + 1
        if limit < 0 and shown:
            break
        shown.append(line)
    left_out = len(lines) - len(shown)
    if left_out:
        shown.append(f"… and {left_out} more: {list_all}")
    return "\n".join([f"\n## {title}", *shown]) + "\n"


def workflow_line(workflow: dict[str, Any]) -> str:
    """Return how a workflow is called, or a skill read, with its description."""
    if workflow.get("kind") == "instructions":
        return _with_comment(f"skills.get({workflow['name']!r})['source']", f"read it: {workflow['description']}")
    return _with_comment(f"workflows.{workflow['name']}{signature(workflow['parameters'])}", workflow["description"])


def artifact_line(artifact: dict[str, Any]) -> str:
    """Return the name of an artifact with its description."""
    description = artifact["description"].partition("\n")[0]
    return f"{artifact['name']}: {description}" if description else str(artifact["name"])


def signature(parameters: Sequence[dict[str, Any]]) -> str:
    """Return the parameters of a workflow as Python code."""
    return f"({', '.join(map(_parameter, parameters))})"


def _with_comment(call: str, description: str) -> str:
    first = description.partition("\n")[0]
    return f"{call}  # {first}" if first else call


def _parameter(parameter: dict[str, Any]) -> str:
    text = str(parameter["name"])
    if parameter.get("type") not in (None, "", "Any"):
        text += f": {parameter['type']}"
    has_no_default = parameter.get("required") or text.startswith("*")
    return text if has_no_default else f"{text} = {parameter.get('default')!r}"
