"""Pure: a workflow's source in, its parameters and description out; read from the syntax tree, never run."""

import ast
import json
import keyword
import re
import unicodedata
import warnings
from dataclasses import dataclass
from typing import Any

from carrel.errors import WorkflowSyntaxError, WorkflowValidationError
from carrel.library.docstrings import Docstring, read_docstring

VERBS = frozenset({"list", "search", "get", "create", "delete", "invoke", "history", "read", "begin", "ended"})
"""What `workflows` itself can do; a workflow of such a name could not be called by it."""
RESERVED = VERBS | {"call_async", "call_sync"}

_DESCRIPTION = "# description: "
LARGEST = 256 * 1024
"""Characters of a source."""
QUICK = 32 * 1024
"""Python reads a source whole, and nothing else of this program runs meanwhile: a longer one is for another process.
It is not compiled either: that can take minutes (lambdas in lambdas)."""
_MOST_NODES = 1000
_LONGEST_VALUE = 2000


@dataclass(frozen=True)
class Parameter:
    """One that `run` takes."""

    name: str
    """With its stars, where it takes any number."""
    type: str
    """The annotation as it is written, "Any" where there is none."""
    description: str
    required: bool
    default: Any
    """Its value where it is plain data, else its source; None where there is none."""

    def as_data(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Outline:
    """What can be known of a workflow without running it."""

    description: str
    parameters: tuple[Parameter, ...]
    is_async: bool
    returns: str
    """The annotation of the result, "" where there is none."""
    doc: str
    """All that its docstrings say."""

    def as_data(self) -> dict[str, Any]:
        return {**vars(self), "parameters": [parameter.as_data() for parameter in self.parameters]}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Outline":
        return cls(**{**data, "parameters": tuple(Parameter(**parameter) for parameter in data["parameters"])})


LONGEST_NAME = 200
"""In bytes: a file has it, with room for what stands beside."""


def checked_name(name: object) -> str:
    """The name itself when a workflow can be called so, else `WorkflowValidationError`."""
    # Python reads a name in its normal form, so another form of it could never be called.
    if not isinstance(name, str) or not name.isidentifier() or unicodedata.normalize("NFKC", name) != name:
        raise WorkflowValidationError(
            f"{name!r} is no name for a workflow: it is called as workflows.NAME(…), so letters, digits and _ only"
        )
    if keyword.iskeyword(name) or name.startswith("_"):
        raise WorkflowValidationError(f"{name!r} is no name for a workflow: no keyword and no _ at its beginning")
    if name in RESERVED:
        raise WorkflowValidationError(f"workflows.{name} is something that workflows itself does; choose another name")
    if len(name.encode()) > LONGEST_NAME:
        raise WorkflowValidationError(f"the name {name[:40]}… is longer than {LONGEST_NAME} bytes; use a shorter one")
    return name


def outline(name: str, source: str, description: str = "") -> Outline:
    """Read a source; `WorkflowValidationError` when it has no `run`, or one that cannot be called.

    A `description` that was given beats what the docstrings say."""
    tree = _parsed(name, source)
    run = _run_of(name, tree)
    of_module, of_run = (read_docstring(ast.get_docstring(node, clean=False)) for node in (tree, run))
    told = _described(of_run.parameters or of_module.parameters)
    return Outline(
        description=description or of_module.summary or of_run.summary,
        parameters=tuple(_parameters(run.args, told)),
        is_async=isinstance(run, ast.AsyncFunctionDef),
        returns=_shown(run.returns) if run.returns is not None else "",
        doc=_all_said(of_module, of_run),
    )


def compiled(name: str, source: str) -> None:
    """`WorkflowSyntaxError` for what Python only refuses when it compiles: `return` outside of a function, ….

    Of a long source that is found out only where it is called."""
    if len(source) <= QUICK:
        _parsed(name, source, flags=0)


def _parsed(name: str, source: str, flags: int = ast.PyCF_ONLY_AST) -> ast.Module:
    if len(source) > LARGEST:
        raise WorkflowValidationError(
            f"the source of {name} is longer than {LARGEST} characters; keep data in an artifact, code in a package"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree: Any = compile(source, f"<workflow {name}>", "exec", flags, dont_inherit=True)
    except SyntaxError as problem:
        line = f": {problem.text.strip()}" if problem.text else ""
        raise _not_python(name, problem, f"line {problem.lineno}: {problem.msg}{line}") from None
    except (ValueError, RecursionError, MemoryError) as problem:
        raise _not_python(name, None, str(problem) or type(problem).__name__) from None
    return tree  # type: ignore[no-any-return]


def _not_python(name: str, problem: SyntaxError | None, why: str) -> WorkflowSyntaxError:
    where = (problem.lineno, problem.offset, problem.text) if problem is not None else (None, None, None)
    return syntax_error(f"the source of {name} is no Python: {why}", *where)


def syntax_error(message: str, line: int | None, offset: int | None, text: str | None) -> WorkflowSyntaxError:
    """The error with what Python says of the place."""
    refused = WorkflowSyntaxError(message)
    refused.msg = message
    refused.lineno, refused.offset, refused.text = line, offset, text
    return refused


def _run_of(name: str, tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef:
    # The last one counts, as when it is run.
    for node in reversed(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "run":
            return node
    raise WorkflowValidationError(
        f"the source of {name} has no function run: a workflow is `def run(…)` or `async def run(…)` at its top level"
    )


def _parameters(takes: ast.arguments, told: dict[str, str]) -> list[Parameter]:
    positional = [*takes.posonlyargs, *takes.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(takes.defaults)) + [*takes.defaults]
    found = [_parameter(taken, default, told) for taken, default in zip(positional, defaults, strict=True)]
    if takes.vararg is not None:
        found.append(_any_number("*", takes.vararg, told))
    found += [_parameter(taken, d, told) for taken, d in zip(takes.kwonlyargs, takes.kw_defaults, strict=True)]
    if takes.kwarg is not None:
        found.append(_any_number("**", takes.kwarg, told))
    return found


def _parameter(taken: ast.arg, default: ast.expr | None, told: dict[str, str]) -> Parameter:
    value = _plain(default) if default is not None else None
    return Parameter(taken.arg, _annotation(taken), told.get(taken.arg, ""), default is None, value)


def _any_number(stars: str, taken: ast.arg, told: dict[str, str]) -> Parameter:
    return Parameter(stars + taken.arg, _annotation(taken), told.get(taken.arg, ""), False, None)


def _annotation(taken: ast.arg) -> str:
    if taken.annotation is None:
        return "Any"
    if isinstance(taken.annotation, ast.Constant) and isinstance(taken.annotation.value, str):
        return taken.annotation.value[:_LONGEST_VALUE]
    return _shown(taken.annotation)


def _plain(node: ast.expr) -> Any:
    """The value of a literal that is JSON data, else the source of the expression."""
    if _is_large(node):
        return "…"
    try:
        value = ast.literal_eval(node)
        same = json.loads(json.dumps(value)) == value
    except (ValueError, TypeError, RecursionError, MemoryError):
        same = False
    return value if same else ast.unparse(node)


def _shown(node: ast.expr) -> str:
    return "…" if _is_large(node) else ast.unparse(node)


def _is_large(node: ast.expr) -> bool:
    """Whether it is too much for a list that shows every workflow."""
    for count, part in enumerate(ast.walk(node)):
        value = part.value if isinstance(part, ast.Constant) else None
        if count > _MOST_NODES or (isinstance(value, (str, bytes)) and len(value) > _LONGEST_VALUE):
            return True
        if isinstance(value, int) and value.bit_length() > _LONGEST_VALUE:
            return True
    return False


def _described(told: dict[str, str]) -> dict[str, str]:
    return {name.lstrip("*"): said for name, said in told.items()}


def _all_said(*docs: Docstring) -> str:
    return "\n\n".join(doc.text for doc in docs if doc.text)


# --- a description that no docstring says ---------------------------------------------------------------------------


def with_description(source: str, description: str) -> str:
    """The source with its description as a comment in its last line, where a person can see and change it.

    At the end, so that every line of the source keeps its number."""
    line = _DESCRIPTION + (json.dumps(description) if _needs_quotes(description) else description)
    # Whether the source ended in a newline is told by whether the comment does.
    return f"{source}{line}\n" if source.endswith("\n") or not source else f"{source}\n{line}"


def without_description(text: str) -> tuple[str, str]:
    """The source and the description that `with_description` put together; "" where there is none."""
    found = re.search(rf"(?:\A|(?<=\n)){_DESCRIPTION}([^\n]*)(\n?)\Z", text)
    if found is None:
        return text, ""
    source = text[: found.start()]
    if not found[2] and source.endswith("\n"):
        source = source[:-1]
    return source, _unquoted(found[1])


def _needs_quotes(description: str) -> bool:
    return not description.isprintable() or description != description.strip() or description.startswith('"')


def _unquoted(written: str) -> str:
    if written.startswith('"'):
        try:
            read = json.loads(written)
        except ValueError:
            return written.strip()  # a person wrote it so
        return read if isinstance(read, str) else written
    return written.strip()
