"""Skills, which carrel calls workflows: as objects, as dicts, and their library."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from carrel import errors
from carrel.compat import INTERNAL, refuse_missing
from carrel.compat.py_code_mode.errors import SkillExecutionError, SkillValidationError
from carrel.library.workflows import WorkflowLibrary
from carrel.session.background_loop import BackgroundLoop
from carrel.session.session import Session
from carrel.session.storage import MemoryStorage

T = TypeVar("T")

_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
_HIDDEN = ("tools", "skills", "workflows", "artifacts", "deps")
"""Parameters through which older skills are given the namespaces."""


@dataclass
class SkillParameter:
    name: str
    type: str = "string"
    description: str = ""
    required: bool = True
    default: Any = None


@dataclass
class SkillMetadata:
    created_at: datetime | None = None
    created_by: str = ""
    source: str = ""


@dataclass
class PythonSkill:
    """A skill with its source, which defines `run`."""

    name: str
    description: str
    parameters: list[SkillParameter]
    source: str
    metadata: SkillMetadata | None = field(default=None, compare=False)

    @classmethod
    def from_source(
        cls, name: str, source: str, description: str = "", metadata: SkillMetadata | None = None
    ) -> PythonSkill:
        """Check the source and read its parameters; ValueError or SyntaxError if it is not valid."""

        async def read() -> dict[str, Any]:
            async with MemoryStorage() as storage:
                library = storage.get_workflow_library()
                await library.add(name, source, description)
                return await library.get(name) or {}

        with skill_errors(name):
            skill = skill_of(wait_for(read()))
        skill.metadata = metadata
        return skill

    async def invoke(self, **kwargs: Any) -> Any:
        """Run the skill in a sandbox of its own, without tools; `SkillExecutionError` if it fails."""
        async with Session(MemoryStorage()) as session:
            await session.add_workflow(self.name, self.source, self.description)
            await session.set_variables(arguments=kwargs)
            result = await session.run(f"workflows.invoke({self.name!r}, **arguments)")
        if result.error is not None:
            raise SkillExecutionError(self.name, RuntimeError(result.error))
        return result.value


class SkillLibrary:
    """The skills of a storage; its methods are plain calls, also while an event loop runs."""

    def __init__(self, library: WorkflowLibrary) -> None:
        self._library = library

    def search(self, query: str, limit: int = 10) -> list[PythonSkill]:
        return self._skills(wait_for(self._library.search(query, limit)))

    def get(self, name: str) -> PythonSkill | None:
        found = wait_for(self._library.get(name))
        return None if found is None else skill_of(found)

    def add(self, skill: PythonSkill) -> None:
        with skill_errors(skill.name):
            wait_for(self._library.add(skill.name, skill.source, skill.description))

    def remove(self, name: str) -> bool:
        return wait_for(self._library.remove(name))

    def refresh(self) -> None:
        """Nothing to do: every call reads what is stored."""

    def __len__(self) -> int:
        return len(wait_for(self._library.list()))

    def _skills(self, found: Iterable[Mapping[str, Any]]) -> list[PythonSkill]:
        skills = [self.get(each["name"]) for each in found]
        return [skill for skill in skills if skill is not None]

    # The last method, because after it `list` means this method.
    def list(self) -> list[PythonSkill]:
        return self._skills(wait_for(self._library.list()))


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that runs on carrel's own event loop, in another thread."""
    return BackgroundLoop.shared().wait(work)


@contextmanager
def skill_errors(name: str) -> Iterator[None]:
    """Raise a `SkillValidationError` for an invalid name or source; a SyntaxError stays one."""
    try:
        yield
    except errors.WorkflowSyntaxError:
        raise
    except errors.WorkflowValidationError as problem:
        raise SkillValidationError(name, str(problem)) from problem


def skill_of(workflow: Mapping[str, Any]) -> PythonSkill:
    """Convert a workflow of carrel."""
    shown = workflow_dict(workflow)
    parameters = [SkillParameter(**each) for each in shown["parameters"]]
    return PythonSkill(shown["name"], shown["description"], parameters, workflow.get("source", ""))


def workflow_dict(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workflow of carrel as a session has it: with JSON's words for types, and its source if known."""
    parameters = [
        {
            "name": each["name"],
            "type": _WORDS.get(each["type"], "string"),
            "description": each["description"],
            "required": each["required"],
            "default": each["default"],
        }
        for each in workflow["parameters"]
        if each["name"] not in _HIDDEN
    ]
    kept = {name: workflow[name] for name in ("name", "description", "source") if name in workflow}
    return {**kept, "parameters": parameters}


def inner_dict(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workflow as the running code gets it: with `params`, the description of each or else its type."""
    shown = workflow_dict(workflow)
    params = {each["name"]: each["description"] or each["type"] for each in shown["parameters"]}
    return {**workflow, **shown, "params": params}


_MISSING = (
    "SkillStore MemorySkillStore FileSkillStore RedisSkillStore VectorStore ModelInfo SearchResult "
    "compute_content_hash SEMANTIC_AVAILABLE MODEL_ALIASES Embedder EmbeddingProvider MockEmbedder "
    "cosine_similarity resolve_model_name RankingConfig create_skill_library"
)
__getattr__ = refuse_missing(__name__, dict.fromkeys(_MISSING.split(), INTERNAL))
