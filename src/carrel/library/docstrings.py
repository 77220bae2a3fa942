"""Pure: a docstring in, what it says of the whole, of each parameter and of the result out."""

import inspect
import re
from dataclasses import dataclass, field

_SECTIONS = {
    "args": "parameters",
    "arguments": "parameters",
    "parameters": "parameters",
    "params": "parameters",
    "keyword args": "parameters",
    "keyword arguments": "parameters",
    "other parameters": "parameters",
    "returns": "returns",
    "return": "returns",
    "yields": "returns",
}
_OTHER = {"raises", "examples", "example", "notes", "note", "see also", "references", "warnings", "attributes", "todo"}

_GOOGLE_ITEM = re.compile(r"(\*{0,2}\w+)\s*(?:\(([^)]*)\))?\s*:\s*(.*)")
_NUMPY_ITEM = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::\s*(.*))?$")
_FIELD = re.compile(r":(param|parameter|arg|argument|key|keyword|returns?|type|rtype|raises?)\b\s*([^:]*):\s*(.*)")


@dataclass(frozen=True)
class Docstring:
    """What one says."""

    summary: str = ""
    """Its first paragraph, on one line."""
    text: str = ""
    """All of its prose, without the sections."""
    parameters: dict[str, str] = field(default_factory=dict)
    returns: str = ""


def read_docstring(text: str | None) -> Docstring:
    """Read one in the manner of Google, NumPy or Sphinx, or in none; never fails."""
    lines = inspect.cleandoc(text or "").splitlines()
    prose: list[str] = []
    parameters: dict[str, str] = {}
    returns: list[str] = []
    at = 0
    while at < len(lines):
        found = _FIELD.match(lines[at].strip())
        section = _section(lines, at)
        if found is not None and not lines[at].startswith((" ", "\t")):
            at, body = _indented(lines, at + 1)
            said = _joined([found[3], *body])
            if found[1].startswith(("param", "arg", "key")) and found[2].strip():
                # The type may stand before the name: `:param int depth:`.
                parameters[found[2].split()[-1].lstrip("*")] = said
            elif found[1].startswith("return"):
                returns = [said]
        elif section is not None:
            kind, begin, underlined = section
            end = _end_of_section(lines, begin, underlined)
            body = lines[begin:end]
            if kind == "parameters":
                parameters.update(_numpy_items(body) if underlined else _google_items(body))
            elif kind == "returns":
                returns = [_returned(body, underlined)]
            at = end
        else:
            prose.append(lines[at])
            at += 1
    said = "\n".join(prose).strip()
    summary = _joined(said.split("\n\n")[0].splitlines())
    return Docstring(summary, said, parameters, _joined(returns))


def _section(lines: list[str], at: int) -> tuple[str, int, bool] | None:
    """(what it holds, where its body begins, whether its title is underlined) when one begins here."""
    line = lines[at]
    title = line.strip().rstrip(":").lower()
    kind = _SECTIONS.get(title, "other" if title in _OTHER else None)
    if kind is None or line[:1].isspace():
        return None
    if at + 1 < len(lines) and re.fullmatch(r"-{3,}|={3,}", lines[at + 1].strip()):
        return kind, at + 2, True
    # A word alone on its line may be prose; with a colon and something indented below it is a title.
    below = next((other for other in lines[at + 1 :] if other.strip()), "")
    return (kind, at + 1, False) if line.rstrip().endswith(":") and below[:1].isspace() else None


def _end_of_section(lines: list[str], begin: int, underlined: bool) -> int:
    for at in range(begin, len(lines)):
        if not lines[at].strip():
            continue
        if underlined:
            if _section(lines, at) is not None:
                return at
        elif not lines[at][:1].isspace():
            return at
    return len(lines)


def _indented(lines: list[str], at: int) -> tuple[int, list[str]]:
    body = []
    while at < len(lines) and lines[at][:1].isspace():
        body.append(lines[at])
        at += 1
    return at, body


def _google_items(body: list[str]) -> dict[str, str]:
    indents = [len(line) - len(line.lstrip()) for line in body if line.strip()]
    outer = min(indents, default=0)
    items: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in body:
        found = _GOOGLE_ITEM.match(line.strip()) if len(line) - len(line.lstrip()) == outer else None
        if found is not None:
            last = items[found[1].lstrip("*")] = [found[3]]
        elif last is not None and line.strip():
            last.append(line)
    return {name: _joined(said) for name, said in items.items()}


def _numpy_items(body: list[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in body:
        found = _NUMPY_ITEM.match(line) if line[:1].strip() else None
        if found is not None:
            last = []
            for name in found[1].split(","):
                items[name.strip().lstrip("*")] = last
        elif last is not None and line.strip():
            last.append(line)
    return {name: _joined(said) for name, said in items.items()}


def _returned(body: list[str], underlined: bool) -> str:
    if underlined:
        return _joined([line for line in body if line[:1].isspace()] or body)
    said = _joined(body)
    # "dict: the answer" says the type first.
    return re.sub(r"^[\w.\[\], |]+:\s+", "", said, count=1)


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
