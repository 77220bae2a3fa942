"""Read docstrings in the styles of Google, NumPy and Sphinx."""

import inspect
from dataclasses import dataclass, field

import docstring_parser


@dataclass(frozen=True)
class Docstring:
    """What a docstring contains."""

    summary: str = ""
    """Its first paragraph, on one line."""
    text: str = ""
    """All of its prose, without the sections."""
    parameters: dict[str, str] = field(default_factory=dict)
    returns: str = ""


def read_docstring(text: str | None) -> Docstring:
    """Read a docstring; one that cannot be parsed is all prose."""
    text = inspect.cleandoc(text or "")
    try:
        # The parser cleans the indentation again; the empty first line keeps a section in the first line intact.
        parsed = docstring_parser.parse("\n" + text)
    except docstring_parser.ParseError:
        return Docstring(_summary(text), text)
    prose = (parsed.description or "").strip()
    parameters: dict[str, str] = {}
    for parameter in parsed.params:
        # NumPy's style describes several at once: `a, b : int`.
        for name in parameter.arg_name.split(","):
            parameters[name.strip().lstrip("*")] = _one_line(parameter.description)
    returns = parsed.returns.description if parsed.returns is not None else None
    return Docstring(_summary(prose), prose, parameters, _one_line(returns))


def _summary(prose: str) -> str:
    return _one_line(prose.split("\n\n")[0])


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
