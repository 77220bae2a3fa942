"""Programs as tools: builds the command line from the arguments of a call, and returns the output."""

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
"""Characters of the output of a failed program in the error message."""


class CliProvider:
    """The tool provider of one CLI definition."""

    def __init__(self, definition: CliDefinition, secrets: Secrets, *, sandbox: Runner | None = None) -> None:
        """`sandbox` runs the program of a definition with `runs: sandbox`."""
        self.name = definition.name
        self._definition = definition
        self._secrets = secrets
        self._sandbox = sandbox
        self._recipes = {f"{self.name}.{python_name(name)}": recipe for name, recipe in definition.recipes.items()}
        self._tools: list[Tool] = []

    async def definitions(self) -> Sequence[Tool]:
        # On first use, because most of the definitions of a session are never used.
        self._tools = self._tools or make_tools(self._definition)
        return self._tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> Any:
        argv, stdin = command_line(self._definition, tool.name, self._recipes.get(tool.name), arguments)
        run = self._runner()
        try:
            env = self._secrets.substitute_all(self._definition.env)
        except ConfigurationError as error:
            raise ConfigurationError(f"{tool.name}, env: {error}") from None
        try:
            result = await run(
                argv, stdin=stdin, env=env, cwd=self._definition.cwd, timeout=tool.timeout, on_output=on_output
            )
        except (OSError, ValueError) as error:
            raise ToolCallError(f"{tool.name}: {_start_error(argv[0], self._definition.cwd, error)}") from None
        return self._value(tool, result)

    async def close(self) -> None:
        """Do nothing: no program runs between calls."""

    def _runner(self) -> Runner:
        if self._definition.runs == "host":
            return run_on_host
        if self._sandbox is None:
            raise ConfigurationError(f"{self.name}: runs: sandbox needs a sandbox; call the tool through a Session")
        return self._sandbox

    def _value(self, tool: Tool, result: ProcessResult) -> Any:
        # Redacted before it is shortened: a part of a secret would not be recognized.
        stderr_bytes = self._secrets.redact_piece(
            result.stderr.encode("utf-8", "surrogateescape"), cut_start=result.stderr_cut
        )
        stderr = last_lines(_decode(stderr_bytes), _LONGEST_STDERR, cut=result.stderr_cut)
        if result.timed_out:
            failure: ToolCallError = ToolTimeoutError(
                f"{tool.name} took longer than {tool.timeout:g} s and was ended{_suffix(stderr)}"
            )
        elif result.exit_code not in self._definition.exit_codes:
            output = stderr or last_lines(_decode(self._stdout(result)), _LONGEST_STDOUT, cut=False)
            failure = ToolCallError(f"{tool.name} ended with exit code {result.exit_code}{_suffix(output)}")
        else:
            return self._parse_output(tool, result)
        failure.exit_code, failure.stderr = result.exit_code, stderr
        raise failure

    def _stdout(self, result: ProcessResult) -> bytes:
        if not result.left_out:
            return self._secrets.redact_bytes(result.stdout)
        before = self._secrets.redact_piece(result.stdout, cut_end=True)
        return before + gap(result.left_out) + self._secrets.redact_piece(result.stdout_end, cut_start=True)

    def _parse_output(self, tool: Tool, result: ProcessResult) -> Any:
        kind = self._definition.output
        if result.left_out and kind != "text":
            raise ToolCallError(
                f"{tool.name} wrote {result.left_out:,} bytes more than are kept, so its {kind} is incomplete; "
                "request less"
            )
        if kind == "json":
            # Parsed first, because a secret may be a number.
            return self._secrets.redact_data(self._parse_json(tool, _decode(result.stdout)))
        stdout = self._stdout(result)
        return stdout if kind == "bytes" else _decode(stdout)

    def _parse_json(self, tool: Tool, text: str) -> Any:
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            beginning = self._secrets.redact(text).strip()[:200]
            raise ToolCallError(f"{tool.name} did not write valid JSON ({error}): {beginning}") from None


def make_tools(definition: CliDefinition) -> list[Tool]:
    """Return the program itself, then its recipes."""
    parameters = definition.parameters
    kinds = {"text": {"type": "string"}, "json": None, "bytes": {"type": "string", "format": "binary"}}
    returns = kinds[definition.output]
    tools = [
        definition.make_tool(
            "",
            _schema(parameters),
            description=definition.description,
            returns=returns,
            positional=_positional(definition),
        )
    ]
    for name, recipe in definition.recipes.items():
        recipe_parameters = _recipe_parameters(parameters, recipe)
        tools.append(
            definition.make_tool(
                python_name(name),
                _schema(recipe_parameters),
                description=recipe.description or definition.description,
                returns=returns,
                tags=recipe.tags,
                approval=recipe.approval,
                timeout=recipe.timeout,
                stream=recipe.stream,
            )
        )
    return tools


def _positional(definition: CliDefinition) -> tuple[str, ...]:
    names = [python_name(part.name) for part in definition.options.positional]
    stdin = python_name(definition.stdin) if definition.stdin is not None else None
    return tuple(names if stdin is None or stdin in names else [*names, stdin])


def _recipe_parameters(parameters: Mapping[str, Parameter], recipe: Recipe) -> dict[str, Parameter]:
    """Return the parameters of a recipe, in the order in which it lists them."""
    found: dict[str, Parameter] = {}
    preset = {python_name(name): value for name, value in recipe.preset.items()}
    for name, changes in recipe.params.items():
        known = parameters[python_name(name)]
        update = changes.model_dump(exclude_none=True)
        # A default, here or in the preset, makes a required parameter optional.
        default = update.get("default", preset.get(python_name(name), known.default))
        required = update.get("required", known.required and default is None)
        found[python_name(name)] = known.model_copy(update={**update, "default": default, "required": required})
    return found


def _schema(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: part.value_schema for name, part in parameters.items()},
        "additionalProperties": False,
    }
    required = [name for name, part in parameters.items() if part.required and part.default is None]
    return {**schema, "required": required} if required else schema


def command_line(
    definition: CliDefinition, tool: str, recipe: Recipe | None, arguments: Mapping[str, Any]
) -> tuple[list[str], bytes | None]:
    """Return the words that the program is started with, and its standard input."""
    parameters = definition.parameters
    values = {name: part.default for name, part in parameters.items() if part.default is not None}
    if recipe is not None:
        values |= {python_name(name): value for name, value in recipe.preset.items()}
        values |= {python_name(name): one.default for name, one in recipe.params.items() if one.default is not None}
    values |= arguments
    stdin = values.pop(python_name(definition.stdin), None) if definition.stdin is not None else None
    words = [*definition.words]
    for name, option in definition.options.options.items():
        if python_name(name) in values:
            words += _option(tool, name, option, values[python_name(name)])
    positional: list[str] = []
    for part in definition.options.positional:
        value = values.get(python_name(part.name))
        items = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        # The definition may put an option here, the caller may not.
        may_be_option = definition.double_dash or python_name(part.name) not in arguments
        positional += [_word(tool, part.name, item, may_be_option=may_be_option) for item in items]
    words += ["--", *positional] if definition.double_dash and positional else positional
    return words, None if stdin is None else _text(stdin).encode("utf-8", "surrogateescape")


def _option(tool: str, name: str, option: Option, value: Any) -> list[str]:
    flag = option.flag or (f"-{option.short}" if option.short else f"--{name}")
    if option.type == "boolean":
        return [flag] if value else []
    words: list[str] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        word = _word(tool, name, item, may_be_option=True)
        if not word.startswith("-"):
            words += [flag, word]
        elif option.flag:
            raise ToolCallError(
                f"{tool}: {python_name(name)} cannot begin with -, because the program could read it as an option"
            )
        else:
            # In one word with its option, so that the program does not read it as another option.
            words.append(f"{flag}{word}" if option.short else f"{flag}={word}")
    return words


def _word(tool: str, name: str, value: Any, *, may_be_option: bool) -> str:
    word = _text(value)
    if "\0" in word:
        raise ToolCallError(
            f"{tool}: {python_name(name)} contains a zero character, which cannot be passed to a program"
        )
    if not may_be_option and word.startswith("-"):
        raise ToolCallError(
            f"{tool}: {python_name(name)} is {word[:60]!r}, which the program would read as an option; "
            "if it understands --, set double_dash: true in the definition"
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


def _start_error(program: str, cwd: str | None, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError) and error.filename == program:
        return f"there is no program {program}; install it, or write its path into the definition's command"
    if isinstance(error, FileNotFoundError | NotADirectoryError) and cwd is not None:
        return f"there is no folder {cwd} to run it in"
    return f"{program} could not be started: {error}"


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _suffix(text: str) -> str:
    return f": {text.strip()}" if text.strip() else ""
