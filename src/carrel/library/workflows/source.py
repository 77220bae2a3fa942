"""Read workflow sources and SKILL.md files without running them."""

import ast
import json
import keyword
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carrel.errors import WorkflowSyntaxError, WorkflowValidationError
from carrel.library.docstrings import Docstring, read_docstring
from carrel.yaml_files import YamlFault, YamlSyntaxFault, read_yaml

VERBS = frozenset({"list", "search", "get", "create", "delete", "invoke", "history", "read", "begin", "ended"})
"""Methods of `workflows` in running code; a workflow cannot have such a name."""
RESERVED = VERBS | {"call_async", "call_sync"}
LARGEST_SOURCE = 64 * 1024
"""Characters of a source. Parsing blocks the process: at this length for a few tenths of a second at worst."""
LONGEST_NAME = 200
"""Bytes of a name; the names of files that belong to a workflow are a little longer."""

_MOST_NODES = 1000
_LONGEST_VALUE = 2000


@dataclass(frozen=True)
class WorkflowParameter:
    """A parameter of `run`."""

    name: str
    """With its stars, if it takes any number of arguments."""
    type: str
    """The annotation as it is written; "Any" without one."""
    description: str
    required: bool
    default: Any
    """Its value if it is JSON data, else its source; None without one."""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class WorkflowSignature:
    """What is known of a workflow without running it."""

    description: str
    parameters: tuple[WorkflowParameter, ...]
    is_async: bool
    returns: str
    """The annotation of the result; empty without one."""
    doc: str
    """The prose of its docstrings."""


def validate_name(name: object) -> str:
    """Return the name of a workflow; `WorkflowValidationError` if code could not call it."""
    # Python normalizes names when it reads code, so a name that is not normalized could never be called.
    if not isinstance(name, str) or not name.isidentifier() or unicodedata.normalize("NFKC", name) != name:
        raise WorkflowValidationError(
            f"invalid workflow name {name!r}: it is called as workflows.NAME(…), so use letters, digits and _ only"
        )
    if keyword.iskeyword(name) or name.startswith("_"):
        raise WorkflowValidationError(
            f"invalid workflow name {name!r}: it must not be a Python keyword and not begin with _"
        )
    if name in RESERVED:
        raise WorkflowValidationError(
            f"invalid workflow name {name!r}: workflows.{name} is a method of workflows itself; choose another name"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise WorkflowValidationError(f"the workflow name {name[:40]}… is longer than {LONGEST_NAME} bytes")
    return name


def read_signature(name: str, source: str, description: str = "") -> WorkflowSignature:
    """Read a source; `WorkflowValidationError` if it has no `run`, `WorkflowSyntaxError` if it is not valid Python.

    `description` replaces that of the docstrings."""
    tree = _parse(name, source)
    run = _find_run(name, tree)
    of_module, of_run = (read_docstring(ast.get_docstring(node, clean=False)) for node in (tree, run))
    return WorkflowSignature(
        description=description or of_module.summary or of_run.summary,
        parameters=tuple(_parameters(run.args, of_run.parameters or of_module.parameters)),
        is_async=isinstance(run, ast.AsyncFunctionDef),
        returns=_to_text(run.returns) if run.returns is not None else "",
        doc=_prose(of_module, of_run),
    )


def _parse(name: str, source: str) -> ast.Module:
    if len(source) > LARGEST_SOURCE:
        raise WorkflowValidationError(
            f"the source of {name} is longer than {LARGEST_SOURCE} characters;"
            " keep data in an artifact and shared code in a package"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Only parsed: compiling can take minutes for a short source, such as 30 nested `finally` blocks.
            tree = ast.parse(source, f"<workflow {name}>")
    except SyntaxError as error:
        line = f": {error.text.strip()}" if error.text else ""
        raise _syntax_error(name, f"line {error.lineno}: {error.msg}{line}", error) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise _syntax_error(name, str(error) or type(error).__name__) from None
    for node in tree.body:
        if isinstance(node, ast.Return):
            place = SyntaxError("", (None, node.lineno, node.col_offset + 1, ""))
            raise _syntax_error(name, f"line {node.lineno}: 'return' outside function", place)
    return tree


def _syntax_error(name: str, why: str, cause: SyntaxError | None = None) -> WorkflowSyntaxError:
    message = f"the source of {name} is not valid Python: {why}"
    error = WorkflowSyntaxError(message)
    error.msg = message
    if cause is not None:
        error.lineno, error.offset, error.text = cause.lineno, cause.offset, cause.text
    return error


def _find_run(name: str, tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef:
    # The last one counts, as when the source runs.
    for node in reversed(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "run":
            return node
    raise WorkflowValidationError(
        f"the source of {name} has no function 'run'; write `def run(…)` or `async def run(…)` at its top level"
    )


def _parameters(arguments: ast.arguments, descriptions: Mapping[str, str]) -> list[WorkflowParameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]

    def variadic(stars: str, argument: ast.arg) -> WorkflowParameter:
        description = descriptions.get(argument.arg, "")
        return WorkflowParameter(stars + argument.arg, _annotation(argument), description, False, None)

    def named(found: Sequence[ast.arg], defaults: Sequence[ast.expr | None]) -> list[WorkflowParameter]:
        return [
            WorkflowParameter(
                argument.arg,
                _annotation(argument),
                descriptions.get(argument.arg, ""),
                default is None,
                _default(default) if default is not None else None,
            )
            for argument, default in zip(found, defaults, strict=True)
        ]

    return [
        *named(positional, defaults),
        *([variadic("*", arguments.vararg)] if arguments.vararg is not None else []),
        *named(arguments.kwonlyargs, arguments.kw_defaults),
        *([variadic("**", arguments.kwarg)] if arguments.kwarg is not None else []),
    ]


def _annotation(argument: ast.arg) -> str:
    if argument.annotation is None:
        return "Any"
    if isinstance(argument.annotation, ast.Constant) and isinstance(argument.annotation.value, str):
        return argument.annotation.value[:_LONGEST_VALUE]
    return _to_text(argument.annotation)


def _default(node: ast.expr) -> Any:
    """Return the value of a literal that is JSON data, else the source of the expression."""
    if _is_large(node):
        return "…"
    try:
        value = ast.literal_eval(node)
        is_json = json.loads(json.dumps(value)) == value
    except (ValueError, TypeError, RecursionError, MemoryError):
        is_json = False
    return value if is_json else ast.unparse(node)


def _to_text(node: ast.expr) -> str:
    return "…" if _is_large(node) else ast.unparse(node)


def _is_large(node: ast.expr) -> bool:
    """Whether an expression is too large for a list of all workflows."""
    for count, part in enumerate(ast.walk(node)):
        value = part.value if isinstance(part, ast.Constant) else None
        if count > _MOST_NODES or (isinstance(value, (str, bytes)) and len(value) > _LONGEST_VALUE):
            return True
        if isinstance(value, int) and value.bit_length() > _LONGEST_VALUE:
            return True
    return False


def _prose(*docs: Docstring) -> str:
    return "\n\n".join(doc.text for doc in docs if doc.text)


# --- a description in the file's last line ----------------------------------------------------------------------------

_DESCRIPTION = "# description: "


def with_description(source: str, description: str) -> str:
    """Return the source with its description as a comment in the last line, where people can see and edit it.

    The lines of the source keep their numbers."""
    line = _DESCRIPTION + (json.dumps(description) if _needs_quotes(description) else description)
    # The comment ends with a newline if the source does.
    return f"{source}{line}\n" if source.endswith("\n") or not source else f"{source}\n{line}"


def without_description(text: str) -> tuple[str, str]:
    """Split what `with_description` made into source and description; the description is empty without a comment."""
    found = re.search(rf"(?:\A|(?<=\n)){_DESCRIPTION}([^\n]*)(\n?)\Z", text)
    if found is None:
        return text, ""
    source = text[: found.start()]
    if not found[2] and source.endswith("\n"):
        source = source[:-1]
    return source, _unquote(found[1])


def _needs_quotes(description: str) -> bool:
    return not description.isprintable() or description != description.strip() or description.startswith('"')


def _unquote(text: str) -> str:
    if text.startswith('"'):
        try:
            value = json.loads(text)
        except ValueError:
            return text.strip()  # written by hand
        return value if isinstance(value, str) else text
    return text.strip()


# --- folders with a SKILL.md (the Agent Skills convention) ------------------------------------------------------------

SKILL_FILE = "SKILL.md"
LARGEST_SKILL = 1024 * 1024
"""Characters of a SKILL.md."""
_LONGEST_FRONT_MATTER = 16 * 1024
_LONGEST_SKILL_NAME = 200
LONGEST_DESCRIPTION = 4000
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_PAIR = re.compile(r"^([\w-]+):(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Skill:
    """A SKILL.md."""

    name: str
    description: str
    instructions: str
    """The text after the front matter."""
    front_matter: dict[str, Any]


def read_skill(folder: str, text: str) -> Skill:
    """Read a SKILL.md; ValueError if its front matter is invalid. A missing name is that of the folder."""
    if len(text) > LARGEST_SKILL:
        raise ValueError(f"it is longer than {LARGEST_SKILL} characters; keep the rest in other files of the folder")
    found = _FRONT_MATTER.match(text)
    front = _read_front_matter(found[1]) if found is not None else {}
    instructions = text[found.end() :] if found is not None else text
    name = str(front.get("name") or folder)[:_LONGEST_SKILL_NAME]
    description = " ".join(str(front.get("description") or _first_line(instructions)).split())[:LONGEST_DESCRIPTION]
    return Skill(name, description, instructions.strip("\n"), front)


def _read_front_matter(text: str) -> dict[str, Any]:
    if len(text) > _LONGEST_FRONT_MATTER:
        raise ValueError(f"its front matter is longer than {_LONGEST_FRONT_MATTER} characters")
    try:
        front, _ = read_yaml(text.encode("utf-8", "surrogatepass"))
    except YamlSyntaxFault:
        # Many descriptions contain a colon and no quotes, which is not valid YAML.
        front = {key: value.strip() for key, value in _PAIR.findall(text)}
    except YamlFault as problem:
        raise ValueError(f"its front matter cannot be read: {problem}") from None
    if front is None:
        return {}
    if not isinstance(front, dict):
        raise ValueError(f"its front matter is a {type(front).__name__}; write lines of `key: value`")
    return {str(key): value for key, value in front.items()}


def _first_line(text: str) -> str:
    return next((line.lstrip("# ") for line in text.splitlines() if line.strip()), "")
