"""Programs as tools: a definition and arguments in, words for the program out; what it wrote is the result."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from carrel.errors import ConfigurationError, ToolCallError, ToolTimeoutError
from carrel.library.names import python_name
from carrel.library.tools.definitions import CliDefinition, Option, Parameter, Recipe
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput, ProcessResult, Runner, gap, last_lines, run_on_host

_LONGEST_STDERR, _LONGEST_STDOUT = 4000, 2000
"""Characters of what a failed program said that its error repeats."""


class CliProvider:
    """The tool provider of one CLI definition."""

    def __init__(self, definition: CliDefinition, secrets: Secrets, *, sandbox: Runner | None = None) -> None:
        """`sandbox`: who runs programs inside, for `runs: sandbox`."""
        self.name = definition.name
        self._definition = definition
        self._secrets = secrets
        self._sandbox = sandbox
        self._recipes = {f"{self.name}.{python_name(name)}": recipe for name, recipe in definition.recipes.items()}
        self._tools: list[Tool] = []

    async def definitions(self) -> Sequence[Tool]:
        # Only now: most of two hundred files are never asked.
        self._tools = self._tools or tools_of(self._definition)
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> Any:
        argv, stdin = words_for(self._definition, tool.name, self._recipes.get(tool.name), arguments)
        run = self._runner()
        try:
            env = self._secrets.fill_all(self._definition.env)
        except ConfigurationError as problem:
            raise ConfigurationError(f"{tool.name}, env: {problem}") from None
        try:
            ended = await run(argv, stdin=stdin, env=env, cwd=self._definition.cwd, timeout=tool.timeout, stream=stream)
        except (OSError, ValueError) as problem:
            raise ToolCallError(f"{tool.name}: {_not_started(argv[0], self._definition.cwd, problem)}") from None
        return self._result(tool, ended)

    async def close(self) -> None:
        """Nothing is left of a program when its call is over."""

    def _runner(self) -> Runner:
        if self._definition.runs == "host":
            return run_on_host
        if self._sandbox is None:
            raise ConfigurationError(f"{self.name}: runs: sandbox, and no sandbox is there; use it through a Session")
        return self._sandbox

    def _result(self, tool: Tool, ended: ProcessResult) -> Any:
        # What is secret goes before anything is cut: half a secret would not be known for one.
        stderr_bytes = ended.stderr.encode("utf-8", "surrogateescape")
        said = self._secrets.hide_cut(stderr_bytes, start=ended.stderr_cut)
        stderr = last_lines(_decoded(said), _LONGEST_STDERR, cut=ended.stderr_cut)
        if ended.timed_out:
            problem: ToolCallError = ToolTimeoutError(
                f"{tool.name} took longer than {tool.timeout:g} s and was ended{_said(stderr)}"
            )
        elif ended.exit_code not in self._definition.exit_codes:
            spoken = _said(stderr or last_lines(_decoded(self._stdout(ended)), _LONGEST_STDOUT, cut=False))
            problem = ToolCallError(f"{tool.name} ended with exit code {ended.exit_code}{spoken}")
        else:
            return self._value(tool, ended)
        problem.exit_code, problem.stderr = ended.exit_code, stderr
        raise problem

    def _stdout(self, ended: ProcessResult) -> bytes:
        if not ended.left_out:
            return self._secrets.hide_bytes(ended.stdout)
        before = self._secrets.hide_cut(ended.stdout, end=True)
        return before + gap(ended.left_out) + self._secrets.hide_cut(ended.stdout_end, start=True)

    def _value(self, tool: Tool, ended: ProcessResult) -> Any:
        kind = self._definition.output
        if ended.left_out and kind != "text":
            raise ToolCallError(
                f"{tool.name} wrote more than can be kept ({ended.left_out:,} bytes too many), "
                f"and half of it is no {kind}; ask it for less"
            )
        if kind == "json":
            # Read first: a value may stand where JSON wants a number.
            return self._secrets.hide_in(self._json(tool, _decoded(ended.stdout)))
        stdout = self._stdout(ended)
        return stdout if kind == "bytes" else _decoded(stdout)

    def _json(self, tool: Tool, text: str) -> Any:
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except ValueError as problem:
            said = self._secrets.hide(text).strip()[:200]
            raise ToolCallError(f"{tool.name} was to write JSON and did not ({problem}): {said}") from None


def tools_of(definition: CliDefinition) -> list[Tool]:
    """The program itself, then its recipes."""
    parameters = definition.parameters
    returns = {"text": {"type": "string"}, "json": None, "bytes": {"type": "string", "format": "binary"}}
    shared: dict[str, Any] = {"returns": returns[definition.output]}
    tools = [
        Tool(
            name=definition.name,
            description=definition.description,
            parameters=_schema(parameters),
            positional=_positional(definition),
            tags=definition.tags,
            approval=definition.approval,
            timeout=definition.timeout,
            stream=definition.stream,
            **shared,
        )
    ]
    for name, recipe in definition.recipes.items():
        left_open = _left_open(parameters, recipe)
        tools.append(
            Tool(
                name=f"{definition.name}.{python_name(name)}",
                description=recipe.description or definition.description,
                parameters=_schema(left_open),
                positional=tuple(left_open),
                tags=(*definition.tags, *(tag for tag in recipe.tags if tag not in definition.tags)),
                approval=recipe.approval or definition.approval,
                timeout=recipe.timeout if recipe.timeout is not None else definition.timeout,
                stream=definition.stream if recipe.stream is None else recipe.stream,
                **shared,
            )
        )
    return tools


def _positional(definition: CliDefinition) -> tuple[str, ...]:
    names = [python_name(part.name) for part in definition.options.positional]
    text = python_name(definition.stdin) if definition.stdin is not None else None
    return tuple(names if text is None or text in names else [*names, text])


def _left_open(parameters: Mapping[str, Parameter], recipe: Recipe) -> dict[str, Parameter]:
    """What the recipe's caller may say, in the order in which the recipe lists it."""
    found: dict[str, Parameter] = {}
    preset = {python_name(name): value for name, value in recipe.preset.items()}
    for name, given in recipe.params.items():
        known = parameters[python_name(name)]
        said = given.model_dump(exclude_none=True)
        # A default set beforehand, here or there, makes a required word one that need not be said.
        default = said.get("default", preset.get(python_name(name), known.default))
        required = said.get("required", known.required and default is None)
        found[python_name(name)] = known.model_copy(update={**said, "default": default, "required": required})
    return found


def _schema(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: part.value_schema for name, part in parameters.items()},
        "additionalProperties": False,
    }
    required = [name for name, part in parameters.items() if part.required and part.default is None]
    return {**schema, "required": required} if required else schema


def words_for(
    definition: CliDefinition, tool: str, recipe: Recipe | None, arguments: Mapping[str, Any]
) -> tuple[list[str], bytes | None]:
    """Pure: the words the program is started with, and its standard input."""
    parameters = definition.parameters
    said = {name: part.default for name, part in parameters.items() if part.default is not None}
    if recipe is not None:
        said |= {python_name(name): value for name, value in recipe.preset.items()}
        said |= {python_name(name): given.default for name, given in recipe.params.items() if given.default is not None}
    said |= arguments
    stdin = said.pop(python_name(definition.stdin), None) if definition.stdin is not None else None
    words = [*definition.words]
    for name, option in definition.options.options.items():
        if python_name(name) in said:
            words += _option(tool, name, option, said[python_name(name)])
    rest: list[str] = []
    for part in definition.options.positional:
        value = said.get(python_name(part.name))
        values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        # Whoever wrote the definition may have put an option there; whoever calls may not.
        free = definition.double_dash or python_name(part.name) not in arguments
        rest += [_word(tool, part.name, item, free=free) for item in values]
    words += ["--", *rest] if definition.double_dash and rest else rest
    return words, None if stdin is None else _text(stdin).encode("utf-8", "surrogateescape")


def _option(tool: str, name: str, option: Option, value: Any) -> list[str]:
    flag = option.flag or (f"-{option.short}" if option.short else f"--{name}")
    if option.type == "boolean":
        return [flag] if value else []
    words: list[str] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        word = _word(tool, name, item, free=True)
        if not word.startswith("-"):
            words += [flag, word]
        elif option.flag:
            raise ToolCallError(f"{tool}: {python_name(name)} may not begin with -, it could be taken for an option")
        else:
            # In one word with its option, so that the program cannot take it for another one.
            words.append(f"{flag}{word}" if option.short else f"{flag}={word}")
    return words


def _word(tool: str, name: str, value: Any, *, free: bool) -> str:
    word = _text(value)
    if "\0" in word:
        raise ToolCallError(f"{tool}: {python_name(name)} has a zero character in it, which no program can be given")
    if not free and word.startswith("-"):
        raise ToolCallError(
            f"{tool}: {python_name(name)} is {word[:60]!r} and would be taken for an option; "
            "the definition may set double_dash: true where the program understands --"
        )
    return word


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case float() if value.is_integer() and abs(value) < 2**53:
            return str(int(value))
        case _:
            return str(value)


def _not_started(program: str, cwd: str | None, problem: OSError | ValueError) -> str:
    if isinstance(problem, FileNotFoundError) and problem.filename == program:
        return f"there is no program {program}; install it, or give its path in the definition's command"
    if isinstance(problem, FileNotFoundError | NotADirectoryError) and cwd is not None:
        return f"there is no folder {cwd} to run it in"
    return f"{program} could not be started: {problem}"


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _said(text: str) -> str:
    return f": {text.strip()}" if text.strip() else ""
