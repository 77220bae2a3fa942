"""Pure: an answer as a request may repeat it: plain data, in the names of the wire, without what only answers have."""

import base64
import keyword
from typing import Any

_DATA = frozenset({"arguments", "attributes", "input", "tools"})
"""What these hold is the model's or the user's, whatever it is named inside."""
_SAYS_BY_NULL = frozenset({"code", "keys", "outputs", "param", "result"})
"""Fields of items that must be there and may be null."""
_NEEDED = {"code_interpreter_call": ("code", "outputs"), "image_generation_call": ("result",)}


def plain(value: Any) -> Any:
    """A client's objects as JSON data, also where they stand inside lists and dicts; bytes as base64."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    match value:
        case dict():
            return {key: plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
        case bytes():
            return base64.b64encode(value).decode("ascii")
    return value


def anthropic_echo(block: dict[str, Any]) -> dict[str, Any]:
    """A block of an answer: the file behind a citation, a null caller and what a client parsed are refused.

    So is a citation without a title, which may be null."""
    echo = {_on_the_wire(name): value for name, value in block.items() if name != "parsed_output"}
    if echo.get("caller", echo) is None:
        del echo["caller"]
    for name in ("content", "citations"):
        if isinstance(echo.get(name), list):
            echo[name] = [anthropic_echo(part) if isinstance(part, dict) else part for part in echo[name]]
    if "cited_text" in echo:
        echo.pop("file_id", None)
        echo.setdefault("title" if str(echo.get("type")).endswith("search_result_location") else "document_title", None)
    return echo


def item_echo(item: dict[str, Any]) -> dict[str, Any]:
    """An item of OpenAI's answer: who made it, nulls and what a client parsed are refused."""
    needed = dict.fromkeys(_NEEDED.get(str(item.get("type")), ()))
    return needed | {
        _on_the_wire(name): value if name in _DATA else _without_nulls(value)
        for name, value in item.items()
        if name not in ("created_by", "parsed", "parsed_arguments") and (value is not None or name in _SAYS_BY_NULL)
    }


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return item_echo(value)
        case list():
            return [_without_nulls(inner) for inner in value]
    return value


def chat_echo(fields: dict[str, Any]) -> dict[str, Any]:
    """What an assistant's message has beside its words, but for sources and what a client parsed; a sound by its id."""
    echo = {name: value for name, value in fields.items() if name not in ("annotations", "parsed")}
    if isinstance(echo.get("audio"), dict) and "id" in echo["audio"]:
        echo["audio"] = {"id": echo["audio"]["id"]}
    return echo


def _on_the_wire(name: str) -> str:
    """Clients write a name that is a word of Python with a line behind it."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name
