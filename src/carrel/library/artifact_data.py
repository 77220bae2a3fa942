"""Pure: data as the bytes of an artifact, and back as it was: text, bytes, or JSON data."""

import json
from typing import Any, Literal

from carrel.errors import ArtifactWriteError

Kind = Literal["text", "bytes", "json"]
KINDS: tuple[Kind, ...] = ("text", "bytes", "json")

_TEXTS = (".txt", ".md", ".csv", ".tsv", ".html", ".xml", ".svg", ".yaml", ".yml", ".toml", ".log", ".py", ".jsonl")
_DEEPEST = 500


def encoded(name: str, data: Any) -> tuple[Kind, bytes]:
    """What kind of data it is, and its bytes; `ArtifactWriteError` for what would not come back as it was."""
    if isinstance(data, str):
        return "text", data.encode("utf-8", "surrogatepass")
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes", bytes(data)
    check_json(name, data)
    try:
        return "json", json.dumps(data, indent=1).encode("ascii")
    except (ValueError, RecursionError) as problem:
        raise ArtifactWriteError(f"{name} was not saved: it is no JSON data: {problem}") from None


def decoded(kind: Kind, data: bytes) -> Any:
    """The data again; ValueError when the bytes are not of this kind."""
    if kind == "bytes":
        return data
    text = data.decode("utf-8", "surrogatepass")
    return json.loads(text) if kind == "json" else text


def guessed(name: str, data: bytes, noted: str | None) -> tuple[Kind, Any]:
    """What a file is that a person put there or edited: what it was noted as when it still can be, else by its look."""
    kinds: list[Kind] = [kind for kind in KINDS if kind == noted]
    if noted is None and name.endswith(".json"):
        kinds = ["json"]
    if b"\0" not in data and kinds != ["bytes"]:
        kinds.append("text")
    for kind in kinds:
        try:
            return kind, decoded(kind, data)
        except ValueError:
            continue
    return "bytes", data


def guessed_kind(name: str) -> Kind:
    """The same for one that is too large to be looked at, by its name alone."""
    return "json" if name.endswith(".json") else "text" if name.endswith(_TEXTS) else "bytes"


def check_json(name: str, data: Any, where: str = "data", depth: int = 0) -> None:
    """`ArtifactWriteError` says what is no JSON data, and where it is. Tuples are taken for lists."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return
    if depth > _DEEPEST:
        raise ArtifactWriteError(f"{name} was not saved: {where[:80]}… is nested too deeply, or contains itself")
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise ArtifactWriteError(
                    f"{name} was not saved: {where} has the key {key!r}, and keys of JSON data are texts: str({key!r})"
                )
            check_json(name, value, f"{where}[{key!r}]", depth + 1)
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            check_json(name, value, f"{where}[{number}]", depth + 1)
    else:
        kind = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
        raise ArtifactWriteError(
            f"{name} was not saved: {where} is a {kind}. What is kept is text, bytes, a file (as a Path) and JSON data;"
            " inside a session also DataFrames and figures"
        )
