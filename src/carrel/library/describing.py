"""What a model is told of the library: a page, however much there is."""

from collections.abc import Sequence
from typing import Any

from carrel.library.artifacts import ArtifactStore
from carrel.library.deps import Deps
from carrel.library.tools.registry import ToolRegistry
from carrel.library.workflows import WorkflowLibrary

_OPENING = """\
Python code runs in a session that keeps its variables between runs; the value of the last expression comes back.
Four names are there: `tools` calls what is outside, `workflows` holds Python that worked, `artifacts` keeps data,
`deps` installs packages: `deps.add("pandas")`, not pip. A plain call waits and returns its value;
`await NAME.call_async(...)` lets many run at once.
"""
_LEAST = 200
"""Characters that a part has at least, where there is anything to say."""


async def described(
    tools: ToolRegistry, workflows: WorkflowLibrary, artifacts: ArtifactStore, deps: Deps, task: str | None, limit: int
) -> str:
    """The four namespaces in about `limit` characters; what fits the task comes first."""
    rest = limit - len(_OPENING)
    kept = await workflows.list()
    if task and kept:
        fitting = await workflows.search(task, 50)
        names = {workflow["name"] for workflow in fitting}
        kept = [*fitting, *(workflow for workflow in kept if workflow["name"] not in names)]
    calls = [workflow_line(each) for each in kept]
    flows = listed("workflows", calls, "workflows.search(query)", max(rest // 4, _LEAST))
    saved = [artifact_line(each) for each in await artifacts.list()]
    data = listed("artifacts", saved, "artifacts.list()", max(rest // 10, _LEAST))
    packages = listed("deps", await deps.list(), "deps.list()", max(rest // 20, _LEAST))
    others = "".join([flows, data, packages])
    stubs = (await tools.describe(task, max(rest - len(others), _LEAST))).rstrip()
    return _OPENING + (f"\n## tools\n{stubs}\n" if stubs else "") + others


def listed(title: str, lines: Sequence[str], more: str, limit: int) -> str:
    """A part of the page: as many lines as there is room for, and how to see the rest."""
    if not lines:
        return ""
    shown: list[str] = []
    room = limit
    for line in lines:
        room -= len(line) + 1
        if room < 0 and shown:
            break
        shown.append(line)
    left = len(lines) - len(shown)
    if left:
        shown.append(f"… and {left} more: {more}")
    return "\n".join([f"\n## {title}", *shown]) + "\n"


def workflow_line(workflow: dict[str, Any]) -> str:
    """How it is called, or read, and what for."""
    if workflow.get("kind") == "instructions":
        return _with_note(f"skills.get({workflow['name']!r})['source']", f"to be read: {workflow['description']}")
    return _with_note(f"workflows.{workflow['name']}{signature(workflow['parameters'])}", workflow["description"])


def signature(parameters: Sequence[dict[str, Any]]) -> str:
    """A workflow's parameters, as code would write them."""
    return f"({', '.join(map(_parameter, parameters))})"


def _with_note(call: str, about: str) -> str:
    first = about.partition("\n")[0]
    return f"{call}  # {first}" if first else call


def _parameter(parameter: dict[str, Any]) -> str:
    text = str(parameter["name"])
    if parameter.get("type") not in (None, "", "Any"):
        text += f": {parameter['type']}"
    needs_none = parameter.get("required") or text.startswith("*")
    return text if needs_none else f"{text} = {parameter.get('default')!r}"


def artifact_line(artifact: dict[str, Any]) -> str:
    """Its name, and what it is."""
    about = artifact["description"].partition("\n")[0]
    return f"{artifact['name']}: {about}" if about else str(artifact["name"])
