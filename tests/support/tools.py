"""ToolRegistry for tests, made from the text of a definition."""

from typing import Any

from carrel.library.tools.cli import CliProvider
from carrel.library.tools.definition_files import parse_definition
from carrel.library.tools.definitions import CliDefinition
from carrel.library.tools.registry import ToolRegistry
from carrel.library.tools.secrets import Secrets
from carrel.processes import Runner


def program(text: str, *, secrets: Secrets | None = None, sandbox: Runner | None = None) -> CliProvider:
    definition = parse_definition(text.encode(), "tools/test.yaml")
    assert isinstance(definition, CliDefinition)
    return CliProvider(definition, secrets or Secrets({}), sandbox=sandbox)


def callable_names(entries: list[dict[str, Any]]) -> list[str]:
    """The whole names of everything that can be called in what `Tools.list` or `search` returned."""
    names = []
    for entry in entries:
        names += [entry["name"]] if "signature" in entry else []
        names += [f"{entry['name']}.{recipe['name']}" for recipe in entry["recipes"]]
    return names


def catalog(*texts: str, environment: dict[str, str] | None = None, **settings: Any) -> ToolRegistry:
    """The tools of some CLI definitions; `environment` is what `${NAME}` stands for."""
    secrets = Secrets(environment or {})
    return ToolRegistry([program(text, secrets=secrets) for text in texts], secrets=secrets, **settings)
