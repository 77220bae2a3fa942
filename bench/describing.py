"""What a page about tools costs a model, against the JSON definitions it would get otherwise."""

import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from carrel.library.names import with_python_names
from carrel.library.tools.stubs import Docs, describe, group_stub
from carrel.library.tools.tool import Tool
from measure import Line, Scale, no_more_than

DATA = Path(__file__).parent / "data" / "mcp_tools"
PAGE = 8000


def servers() -> dict[str, list[dict[str, Any]]]:
    """What each public server says of its tools."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8"))["tools"] for path in sorted(DATA.glob("*.json"))}


def as_tools(server: str, definitions: list[dict[str, Any]]) -> list[Tool]:
    return [
        Tool(
            name=f"{server}.{one['name']}",
            description=one.get("description", ""),
            parameters=parameters,
            positional=tuple(parameters["properties"]),
        )
        for one, parameters in ((one, with_python_names(one["inputSchema"])[0]) for one in definitions)
    ]


def as_json(definitions: list[dict[str, Any]], indent: int | None = None) -> str:
    """As a model sees it: a Chinese word is itself, and not six characters for each of its own."""
    return json.dumps(definitions, ensure_ascii=False, indent=indent)


def as_requested(definitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a request to a model has room for: no schema of results, no annotations."""
    return [{key: one[key] for key in ("name", "description", "inputSchema") if key in one} for one in definitions]


class Counted:
    """Tokens of a text, by the tokenizer that lies inside wordllama (Llama 2's)."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("wordllama")
        assert found is not None
        assert found.submodule_search_locations is not None
        place = Path(found.submodule_search_locations[0]) / "tokenizers" / "l2_supercat_tokenizer_config.json"
        self._tokenizer = Tokenizer.from_file(str(place))
        self._tokenizer.no_truncation()

    def __call__(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)


def rows() -> list[str]:
    """The table of data/mcp_tools/README.md, without the stars: a server to a line."""
    count = Counted()
    lines = []
    for path in sorted(DATA.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        tools = as_tools(path.stem, data["tools"])
        plain, full = count(as_json(data["tools"])), count(as_json(as_requested(data["tools"])))
        every, line = (count(group_stub(path.stem, [(tool, docs) for tool in tools])) for docs in ("all", "line"))
        cells = [path.stem, data["package"], data["from"], data["version"], data["license"] or "none named"]
        cells += [f"{number:,}" for number in (len(tools), plain, full)]
        cells += [f"{100 * part / plain:.0f} %" for part in (every, line)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


async def measure(scale: Scale) -> list[Line]:
    count = Counted()
    given = servers()
    tools = {server: as_tools(server, definitions) for server, definitions in given.items()}
    everything = [tool for some in tools.values() for tool in some]
    plain = sum(count(as_json(definitions)) for definitions in given.values())
    full = sum(count(as_json(as_requested(definitions))) for definitions in given.values())
    indented = sum(count(as_json(definitions, indent=2)) for definitions in given.values())
    data = {server: [" ".join(text.split()) for text in _prose(definitions)] for server, definitions in given.items()}
    prose = sum(count(text) for texts in data.values() for text in texts)
    once = sum(count(text) for texts in data.values() for text in set(texts))
    bare = sum(count(group_stub(server, [(tool, "none") for tool in some])) for server, some in tools.items())

    def stubs(docs: Docs) -> int:
        return sum(count(group_stub(server, [(tool, docs) for tool in some])) for server, some in tools.items())

    how = (
        f"{len(everything)} tools of {len(given)} servers; as JSON {plain:,} tokens, of which the "
        f"prose is {100 * prose / plain:.1f} %, each text once {100 * once / plain:.1f} %; stubs without any "
        f"{100 * bare / plain:.1f} %; indented {indented:,} tokens"
    )
    lines: list[Line] = []
    for what, docs, limit in (("all docs", "all", 50.0), ("one-line docs", "line", 16.0)):
        took = stubs(docs)  # type: ignore[arg-type]
        note = (
            f"{took:,} tokens, {100 * took / full:.1f} % of name, description and inputSchema alone, "
            f"{100 * took / indented:.1f} % of the indented; {how}"
        )
        lines.append(no_more_than(f"stubs with {what}, of the JSON's tokens", 100 * took / plain, limit, "%", how=note))
    samples = []
    for _ in range(3 if scale.quick else 15):
        start = time.perf_counter()
        page = describe(everything, PAGE)
        samples.append(time.perf_counter() - start)
    assert len(page) <= PAGE
    seconds = statistics.median(samples)
    lines.append(
        Line(
            f"a page about {len(everything)} tools",
            1e3 * seconds,
            None,
            "ms",
            "(only to know)",
            True,
            repeats=len(samples),
            how=f"{len(page):,} characters, {count(page):,} tokens",
        )
    )
    return lines


def _prose(node: Any) -> list[str]:
    """Every description in what a server says of the arguments of its tools, and of the tools."""
    if isinstance(node, list):
        return [text for item in node for text in _prose(item)]
    if not isinstance(node, dict):
        return []
    own = [node["description"]] if isinstance(node.get("description"), str) else []
    return own + [
        text for key, item in node.items() if key not in ("description", "outputSchema") for text in _prose(item)
    ]


if __name__ == "__main__":
    print("\n".join(rows()))
