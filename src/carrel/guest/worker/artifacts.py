"""`artifacts` in running code: converts data frames and figures to files, and sends large artifacts in pieces."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from .host_calls import AttributeDict, HostCallClient, RemoteName, error_class, with_attributes

PIECE = 4 * 1024 * 1024
"""Bytes that are sent to the host at once."""
_DEEPEST = 500
_NO_PARQUET = 'tables are saved as Parquet, for which pandas needs pyarrow; deps.add("pyarrow") installs it'

Call = Callable[[str, list[Any], dict[str, Any]], Awaitable[Any]]
"""Calls a method of the namespace on the host."""


class Artifacts(RemoteName):
    """`artifacts`."""

    __slots__ = ("_files",)
    _files: LocalFiles

    def __init__(self, host: HostCallClient, name: str) -> None:
        super().__init__(host, name)
        object.__setattr__(self, "_files", LocalFiles(host, name))

    def __getattr__(self, name: str) -> Any:
        function = _SEQUENCES.get(name)
        if function is None:
            return _ArtifactCall(self._host, super().__getattr__(name)._name, self._files)
        return _CallSequence(self._host, self._name, function, self._files)

    def __repr__(self) -> str:
        return f"<{self._name}: save(name, data), load(name), list(), get(name), exists(name), delete(name)>"


class ArtifactsWithPath(Artifacts):
    """`artifacts` of code that sees their folder, if the host answers `artifacts.path`."""

    __slots__ = ()

    @property
    def path(self) -> str:
        return str(self._host.call(f"{self._name}.path", {"args": [], "kwargs": {}}))


class LocalFiles:
    """Gives artifacts a `path` that can be opened here: that of the host if possible, else that of a copy."""

    def __init__(self, host: HostCallClient, name: str) -> None:
        self._host, self._name = host, name
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def with_paths(self, value: Any) -> Any:
        """Return the host's entries of artifacts as code gets them."""
        if isinstance(value, list):
            return [self.with_paths(item) for item in value]
        record = with_attributes(value)
        if not isinstance(record, AttributeDict) or os.path.isabs(record.get("path", "/")):
            return record
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="artifacts-")
        path = os.path.join(self._folder.name, *str(record["name"]).split("/"))
        return ArtifactRecord({**record, "path": path}, self)

    def copy(self, name: str, path: str) -> None:
        _CallSequence(self._host, self._name, _copy_to, self)(name, path)


class ArtifactRecord(AttributeDict):
    """An entry of an artifact; its `path` is a copy that is made when the path is read."""

    def __init__(self, record: dict[str, Any], files: LocalFiles) -> None:
        super().__init__(record)
        object.__setattr__(self, "_files", files)
        object.__setattr__(self, "_is_copied", False)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key == "path" and not (self._is_copied and os.path.exists(value)):
            # The path of an artifact that was deleted meanwhile does not exist.
            with contextlib.suppress(FileNotFoundError):
                self._files.copy(super().__getitem__("name"), value)
                object.__setattr__(self, "_is_copied", True)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key == "path" and key in self else super().get(key, default)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return AttributeDict, (dict(self),)


class _ArtifactCall(RemoteName):
    """A call of the host that may return entries of artifacts."""

    __slots__ = ("_files",)
    _files: LocalFiles

    def __init__(self, host: HostCallClient, name: str, files: LocalFiles) -> None:
        super().__init__(host, name)
        object.__setattr__(self, "_files", files)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._files.with_paths(super().__call__(*args, **kwargs))

    def call_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._later(super().call_async(*args, **kwargs))

    async def _later(self, call: Any) -> Any:
        return self._files.with_paths(await call)


class _CallSequence:
    """A function that makes several calls of the host: by what it gets as its first argument, which waits or awaits."""

    def __init__(
        self, host: HostCallClient, name: str, function: Callable[..., Coroutine[Any, Any, Any]], files: LocalFiles
    ) -> None:
        self._host, self._name, self._function, self._files = host, name, function, files

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        async def call(method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
            return self._host.call(f"{self._name}.{method}", {"args": args, "kwargs": kwargs})

        try:
            self._function(call, *args, **kwargs).send(None)
        except StopIteration as end:
            return self._result(end.value)
        raise AssertionError("nothing that it awaits ever waits")

    call_sync = __call__

    async def call_async(self, *args: Any, **kwargs: Any) -> Any:
        def call(method: str, args: list[Any], kwargs: dict[str, Any]) -> Awaitable[Any]:
            return self._host.call_async(f"{self._name}.{method}", {"args": args, "kwargs": kwargs})

        return self._result(await self._function(call, *args, **kwargs))

    def _result(self, value: Any) -> Any:
        return self._files.with_paths(value) if self._function is _save else value


# --- saving ---------------------------------------------------------------------------------------------------------


async def _save(call: Call, name: str, data: Any, description: str = "", metadata: Any = None) -> Any:
    if not isinstance(name, str):
        _write_error("")  # makes its base class
        raise error_class("ArtifactNameRefused", ["ArtifactWriteError", "ValueError"])(
            f"artifacts.save(name, data): the name must be a str such as 'report.md', not {_type_name(name)}"
        )
    kind, form, pieces = _encode(name, data)
    details = {"kind": kind, "form": form, "description": description, "metadata": metadata}
    first = next(pieces, b"")
    second = next(pieces, None)
    if second is None:
        return await call("keep", [name, first], details)
    upload = await call("begin_upload", [name], details)
    try:
        await call("upload", [upload, first], {})
        piece: bytes | None = second
        while piece is not None:
            await call("upload", [upload, piece], {})
            piece = next(pieces, None)
        return await call("end_upload", [upload], {})
    except GeneratorExit:
        raise
    except BaseException:
        await call("drop_upload", [upload], {})
        raise


def _encode(name: str, data: Any) -> tuple[str, str, Iterator[bytes]]:
    """Return the kind of the data, the library of its type, and its bytes in pieces."""
    suffix = pathlib.PurePosixPath(str(name)).suffix.lower()
    if isinstance(data, str):
        return "text", "", _split(data.encode("utf-8", "surrogatepass"))
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes", "", _split(bytes(data))
    if isinstance(data, os.PathLike):
        return "bytes", "", _read(open(data, "rb"), closes=True)
    if callable(getattr(data, "read", None)):
        text = isinstance(data, io.TextIOBase)
        return ("text" if text else "bytes"), "", _read(data, closes=False)
    encoded = _encode_frame(name, data, suffix) or _encode_picture(data, suffix)
    if encoded is not None:
        kind, form, content = encoded
        return kind, form, _split(content)
    _check_json(name, data, "data", 0)
    try:
        return "json", "", _split(json.dumps(data, indent=1, default=_number).encode("ascii"))
    except (ValueError, TypeError, RecursionError) as error:
        raise _write_error(f"{name} was not saved: it is not JSON data: {error}") from None


def _split(data: bytes) -> Iterator[bytes]:
    if len(data) <= PIECE:
        yield data
        return
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def _read(file: Any, closes: bool) -> Iterator[bytes]:
    try:
        while True:
            piece = file.read(PIECE)
            if not piece:
                return
            yield piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else bytes(piece)
    finally:
        if closes:
            file.close()


def _type_name(data: Any) -> str:
    return f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")


def _encode_frame(name: object, data: Any, suffix: str) -> tuple[str, str, bytes] | None:
    """Encode a data frame as Parquet, or in the format of the name's suffix; None for other data."""
    library = type(data).__module__.partition(".")[0]
    if library == "pandas" and type(data).__name__ == "Series":
        data = data.to_frame()
    if library not in ("pandas", "polars") or type(data).__name__ != "DataFrame":
        return None
    pandas = library == "pandas"
    if suffix in (".csv", ".tsv"):
        separator = "\t" if suffix == ".tsv" else ","
        text = data.to_csv(index=False, sep=separator) if pandas else data.write_csv(separator=separator)
        return "text", "", text.encode("utf-8")
    if suffix == ".json":
        text = data.to_json(orient="records") if pandas else data.write_json()
        return "json", "", text.encode("utf-8")
    out = io.BytesIO()
    try:
        data.to_parquet(out) if pandas else data.write_parquet(out)
    except ImportError as error:
        raise _write_error(f"{name} was not saved: {_NO_PARQUET}") from error
    return "bytes", library, out.getvalue()


def _encode_picture(data: Any, suffix: str) -> tuple[str, str, bytes] | None:
    """Encode a figure or an image as PNG, or in the format of the name's suffix; None for other data."""
    library = type(data).__module__.partition(".")[0]
    out = io.BytesIO()
    if library == "matplotlib":
        figure = data if hasattr(data, "savefig") else getattr(data, "figure", None)
        if figure is None:
            return None
        figure.savefig(out, format=suffix[1:] if suffix in (".svg", ".pdf", ".jpg", ".jpeg") else "png")
    elif library == "PIL" and callable(getattr(data, "save", None)):
        formats = {".jpg": "JPEG", ".jpeg": "JPEG", ".gif": "GIF", ".webp": "WEBP", ".bmp": "BMP", ".tiff": "TIFF"}
        data.save(out, format=formats.get(suffix, "PNG"))
    else:
        return None
    return "bytes", "", out.getvalue()


_INSTEAD = {"numpy.ndarray": "; save its .tolist()"}


def _check_json(name: object, data: Any, path: str, depth: int) -> None:
    if data is None or isinstance(data, (bool, int, float, str)):
        return
    if depth > _DEEPEST:
        raise _write_error(f"{name} was not saved: {path[:80]}… is nested too deeply, or contains itself")
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise _write_error(
                    f"{name} was not saved: {path} has the key {key!r}, and keys of JSON data are str; use str({key!r})"
                )
            _check_json(name, value, f"{path}[{key!r}]", depth + 1)
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            _check_json(name, value, f"{path}[{number}]", depth + 1)
    elif _number(data) is None:
        raise _write_error(
            f"{name} was not saved: {path} is a {_type_name(data)}; save str, bytes, a file (a Path or an open file),"
            f" JSON data, a DataFrame or a figure{_INSTEAD.get(_type_name(data), '')}"
        )


def _number(data: Any) -> bool | int | float | None:
    """Return a number of NumPy as one of Python; None for other data."""
    if type(data).__module__ != "numpy" or getattr(data, "ndim", 1) != 0:
        return None
    number = data.item()
    return number if isinstance(number, (bool, int, float)) else None


def _write_error(message: str) -> Exception:
    return error_class("ArtifactWriteError", ["OSError"])(message)


# --- loading --------------------------------------------------------------------------------------------------------


async def _load(call: Call, name: str) -> Any:
    found = await call("fetch", [name], {})
    data = found.get("data")
    if data is None:
        parts = []
        size = 0
        while size < found["size"]:
            piece = await call("piece", [name, size, found["stamp"]], {})
            if not piece:
                break
            parts.append(piece)
            size += len(piece)
        data = b"".join(parts)
    return _decode(found["kind"], found["form"], data)


def _decode(kind: str, form: str, data: bytes) -> Any:
    if form in ("pandas", "polars"):
        frames = importlib.import_module(form)
        try:
            return frames.read_parquet(io.BytesIO(data))
        except ImportError as error:
            raise error_class("ArtifactReadError", ["OSError"])(f"it was not loaded: {_NO_PARQUET}") from error
    if kind == "bytes":
        return data
    text = data.decode("utf-8", "surrogatepass")
    return json.loads(text) if kind == "json" else text


async def _copy_to(call: Call, name: str, path: Any) -> Any:
    """Write an artifact to a file in pieces; return the path of the file."""
    found = await call("fetch", [name], {})
    target = pathlib.Path(path)
    if target.is_dir():
        target = target / pathlib.PurePosixPath(name).name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        data = found.get("data")
        if data is not None:
            file.write(data)
        size = file.tell()
        while size < found["size"]:
            piece = await call("piece", [name, size, found["stamp"]], {})
            if not piece:
                break
            size += file.write(piece)
    return target


_SEQUENCES: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {"save": _save, "load": _load, "copy_to": _copy_to}
for _name, _function in _SEQUENCES.items():
    _function.__qualname__ = f"artifacts.{_name}"  # shown by Python when the arguments do not match
