"""Artifacts as code inside saves and loads them: frames and figures become files here, and large ones go in pieces."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

from .host_calls import AttributeDict, HostCallClient, RemoteName, with_attributes
from .host_errors import error_class

PIECE = 4 * 1024 * 1024
"""What goes to the host at once."""
_DEEPEST = 500
_NO_PARQUET = 'a table is kept as Parquet, and pandas needs pyarrow for that; deps.add("pyarrow") installs it'

Steps = Generator[tuple[str, list[Any], dict[str, Any]], Any, Any]
"""Yields what is to be asked of the host, is sent the answer, and returns the result: for code that waits and that
awaits alike."""


class Artifacts(RemoteName):
    """`artifacts`."""

    __slots__ = ("_files",)
    _files: LocalFiles

    def __init__(self, host: HostCallClient, name: str) -> None:
        super().__init__(host, name)
        object.__setattr__(self, "_files", LocalFiles(host, name))

    def __getattr__(self, name: str) -> Any:
        steps = _STEPS.get(name)
        if steps is None:
            return _ArtifactCall(self._host, super().__getattr__(name)._name, self._files)
        return _Stepping(self._host, self._name, steps, self._files)

    def __repr__(self) -> str:
        return f"<{self._name}: save(name, data), load(name), list(), get(name), exists(name), delete(name)>"


class LocalFiles:
    """Gives artifacts a `path` that opens here: one of the host's where it does, else that of a copy."""

    def __init__(self, host: HostCallClient, name: str) -> None:
        self._host, self._name = host, name
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def with_paths(self, value: Any) -> Any:
        """The host's records of artifacts, as code gets them."""
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
        _Stepping(self._host, self._name, _copy_to, self)(name, path)


class ArtifactRecord(AttributeDict):
    """What is known of an artifact; its `path` is a copy here, which is made when the path is read."""

    def __init__(self, record: dict[str, Any], files: LocalFiles) -> None:
        super().__init__(record)
        object.__setattr__(self, "_files", files)
        object.__setattr__(self, "_is_copied", False)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key == "path" and not (self._is_copied and os.path.exists(value)):
            # One that was deleted meanwhile has a path that does not open.
            with contextlib.suppress(FileNotFoundError):
                self._files.copy(super().__getitem__("name"), value)
                object.__setattr__(self, "_is_copied", True)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key == "path" and key in self else super().get(key, default)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return AttributeDict, (dict(self),)


class _ArtifactCall(RemoteName):
    """A call of the host's that may return records of artifacts."""

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


class _Stepping:
    """A call that takes several questions."""

    def __init__(self, host: HostCallClient, name: str, steps: Callable[..., Steps], files: LocalFiles) -> None:
        self._host, self._name, self._steps, self._files = host, name, steps, files

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        steps = self._steps(*args, **kwargs)
        step: Callable[[], tuple[str, list[Any], dict[str, Any]]] = steps.__next__
        while True:
            try:
                verb, asked, named = step()
            except StopIteration as end:
                return self._result(end.value)
            try:
                answer = self._host.call(f"{self._name}.{verb}", {"args": asked, "kwargs": named})
            except BaseException as problem:  # noqa: BLE001 - the steps see to it, and raise it again
                step = _throwing(steps, problem)
            else:
                step = _sending(steps, answer)

    call_sync = __call__

    async def call_async(self, *args: Any, **kwargs: Any) -> Any:
        steps = self._steps(*args, **kwargs)
        step: Callable[[], tuple[str, list[Any], dict[str, Any]]] = steps.__next__
        while True:
            try:
                verb, asked, named = step()
            except StopIteration as end:
                return self._result(end.value)
            try:
                answer = await self._host.call_async(f"{self._name}.{verb}", {"args": asked, "kwargs": named})
            except BaseException as problem:  # noqa: BLE001 - the steps see to it, and raise it again
                step = _throwing(steps, problem)
            else:
                step = _sending(steps, answer)

    def _result(self, value: Any) -> Any:
        return self._files.with_paths(value) if self._steps is _save else value


def _sending(steps: Steps, answer: Any) -> Callable[[], tuple[str, list[Any], dict[str, Any]]]:
    return lambda: steps.send(answer)


def _throwing(steps: Steps, problem: BaseException) -> Callable[[], tuple[str, list[Any], dict[str, Any]]]:
    return lambda: steps.throw(problem)


# --- saving ---------------------------------------------------------------------------------------------------------


def _save(name: str, data: Any, description: str = "", metadata: Any = None) -> Steps:
    if not isinstance(name, str):
        _refused("")  # the class that this one is too
        raise error_class("ArtifactNameRefused", ["ArtifactWriteError", "ValueError"])(
            f"artifacts.save(name, data): the name is a text like 'report.md' or 'plots/a.png', not a {_kind_of(name)}"
        )
    kind, form, pieces = _prepared(name, data)
    about = {"kind": kind, "form": form, "description": description, "metadata": metadata}
    first = next(pieces, b"")
    second = next(pieces, None)
    if second is None:
        return (yield "keep", [name, first], about)
    number = yield "begin_upload", [name], about
    try:
        yield "upload", [number, first], {}
        piece: bytes | None = second
        while piece is not None:
            yield "upload", [number, piece], {}
            piece = next(pieces, None)
        return (yield "end_upload", [number], {})
    except GeneratorExit:
        raise
    except BaseException:
        yield "drop_upload", [number], {}
        raise


def _prepared(name: str, data: Any) -> tuple[str, str, Iterator[bytes]]:
    """What kind of data it is, what it was made of, and its bytes."""
    suffix = pathlib.PurePosixPath(str(name)).suffix.lower()
    if isinstance(data, str):
        return "text", "", _cut(data.encode("utf-8", "surrogatepass"))
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes", "", _cut(bytes(data))
    if isinstance(data, os.PathLike):
        return "bytes", "", _read(open(data, "rb"), closes=True)
    if callable(getattr(data, "read", None)):
        text = isinstance(data, io.TextIOBase)
        return ("text" if text else "bytes"), "", _read(data, closes=False)
    made = _frame(name, data, suffix) or _picture(data, suffix)
    if made is not None:
        kind, form, content = made
        return kind, form, _cut(content)
    _check(name, data, "data", 0)
    try:
        return "json", "", _cut(json.dumps(data, indent=1, default=_number).encode("ascii"))
    except (ValueError, TypeError, RecursionError) as problem:
        raise _refused(f"{name} was not saved: it is no JSON data: {problem}") from None


def _cut(data: bytes) -> Iterator[bytes]:
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


def _kind_of(data: Any) -> str:
    return f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")


def _frame(name: object, data: Any, suffix: str) -> tuple[str, str, bytes] | None:
    """A table of pandas or polars: as Parquet, or as the name's suffix says."""
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
    except ImportError as problem:
        raise _refused(f"{name} was not saved: {_NO_PARQUET}") from problem
    return "bytes", library, out.getvalue()


def _picture(data: Any, suffix: str) -> tuple[str, str, bytes] | None:
    """A figure of matplotlib or an image of Pillow: as PNG, or as the name's suffix says."""
    library = type(data).__module__.partition(".")[0]
    out = io.BytesIO()
    if library == "matplotlib":
        figure = data if hasattr(data, "savefig") else getattr(data, "figure", None)
        if figure is None:
            return None
        figure.savefig(out, format=suffix[1:] if suffix in (".svg", ".pdf", ".jpg", ".jpeg") else "png")
    elif library == "PIL" and callable(getattr(data, "save", None)):
        named = {".jpg": "JPEG", ".jpeg": "JPEG", ".gif": "GIF", ".webp": "WEBP", ".bmp": "BMP", ".tiff": "TIFF"}
        data.save(out, format=named.get(suffix, "PNG"))
    else:
        return None
    return "bytes", "", out.getvalue()


_INSTEAD = {"numpy.ndarray": "; save its .tolist()"}


def _check(name: object, data: Any, where: str, depth: int) -> None:
    if data is None or isinstance(data, (bool, int, float, str)):
        return
    if depth > _DEEPEST:
        raise _refused(f"{name} was not saved: {where[:80]}… is nested too deeply, or contains itself")
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise _refused(
                    f"{name} was not saved: {where} has the key {key!r}, and keys of JSON data are texts: str({key!r})"
                )
            _check(name, value, f"{where}[{key!r}]", depth + 1)
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            _check(name, value, f"{where}[{number}]", depth + 1)
    elif _number(data) is None:
        raise _refused(
            f"{name} was not saved: {where} is a {_kind_of(data)}. What is kept is text, bytes, files (a Path, or one"
            f" that is open), JSON data, DataFrames and figures{_INSTEAD.get(_kind_of(data), '')}"
        )


def _number(data: Any) -> bool | int | float | None:
    """What NumPy calls a number of its own, as sums and counts of tables are; None of anything else."""
    if type(data).__module__ != "numpy" or getattr(data, "ndim", 1) != 0:
        return None
    number = data.item()
    return number if isinstance(number, (bool, int, float)) else None


def _refused(message: str) -> Exception:
    return error_class("ArtifactWriteError", ["OSError"])(message)


# --- loading --------------------------------------------------------------------------------------------------------


def _load(name: str) -> Steps:
    found = yield "fetch", [name], {}
    data = found.get("data")
    if data is None:
        parts = []
        size = 0
        while size < found["size"]:
            piece = yield "piece", [name, size, found["stamp"]], {}
            if not piece:
                break
            parts.append(piece)
            size += len(piece)
        data = b"".join(parts)
    return _as_it_was(found["kind"], found["form"], data)


def _as_it_was(kind: str, form: str, data: bytes) -> Any:
    if form in ("pandas", "polars"):
        frames = importlib.import_module(form)
        try:
            return frames.read_parquet(io.BytesIO(data))
        except ImportError as problem:
            raise error_class("ArtifactReadError", ["OSError"])(f"it was not loaded: {_NO_PARQUET}") from problem
    if kind == "bytes":
        return data
    text = data.decode("utf-8", "surrogatepass")
    return json.loads(text) if kind == "json" else text


def _copy_to(name: str, path: Any) -> Steps:
    """Write an artifact to a file here without holding it; returns the file's path."""
    found = yield "fetch", [name], {}
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
            piece = yield "piece", [name, size, found["stamp"]], {}
            if not piece:
                break
            size += file.write(piece)
    return target


_STEPS: dict[str, Callable[..., Steps]] = {"save": _save, "load": _load, "copy_to": _copy_to}
for _verb, _steps in _STEPS.items():
    _steps.__qualname__ = f"artifacts.{_verb}"  # what Python calls it when its arguments do not fit
