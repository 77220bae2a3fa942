"""Vectors in a byte per dimension, and a search for the nearest; numpy is used if it is installed."""

from collections.abc import Hashable, Iterable, Sequence
from importlib.util import find_spec
from operator import mul
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_FEW = 20


def pack_vectors(vectors: Iterable[Iterable[float]], dimensions: int) -> list[bytes]:
    """Encode each vector in a byte per dimension, which keeps only its direction, to about half a degree."""
    if hasattr(vectors, "astype") and getattr(vectors, "shape", ())[1:] == (dimensions,):
        import numpy  # noqa: PLC0415 - these are numpy's vectors, so it is loaded

        table = numpy.asarray(vectors)
        longest = numpy.maximum(numpy.abs(table).max(axis=1, keepdims=True, initial=0.0), 1e-12)
        return [row.tobytes() for row in numpy.rint(table / longest * 127).astype(numpy.int8)]
    return [_pack(list(map(float, vector)), dimensions) for vector in vectors]


def _pack(vector: list[float], dimensions: int) -> bytes:
    if len(vector) != dimensions:
        raise ValueError(
            f"the embedder returned a vector of {len(vector)} numbers, and its dimensions are {dimensions}"
        )
    scale = 127 / max(max(map(abs, vector), default=0.0), 1e-12)
    return bytes(round(number * scale) & 0xFF for number in vector)


class NearestVectors(Generic[Key]):
    """Finds the vectors with the highest cosine to another one; uses numpy if it is installed.

    With `centered`, the average of all vectors is subtracted from them and from the query, because it does not
    distinguish any of them; of few vectors only a part, because they may be similar by chance."""

    def __init__(
        self, keys: Sequence[Key], packed: Sequence[bytes], dimensions: int, *, centered: bool = False
    ) -> None:
        self._keys = list(keys)
        weight = 1 / (len(keys) + _FEW) if centered else 0.0
        self._numpy: Any = None
        if find_spec("numpy"):
            import numpy  # noqa: PLC0415 - slow to import, and optional

            self._numpy = numpy
            table = numpy.frombuffer(b"".join(packed), numpy.int8).reshape(-1, dimensions).astype(numpy.float32)
            table /= numpy.maximum(numpy.linalg.norm(table, axis=1, keepdims=True), 1e-12)
            self._center: Any = table.sum(axis=0) * numpy.float32(weight)
            if centered:
                table -= self._center
                table /= numpy.maximum(numpy.linalg.norm(table, axis=1, keepdims=True), 1e-12)
            self._table: Any = table
        else:
            rows = [_unit(memoryview(row).cast("b").tolist()) for row in packed]
            self._center = [sum(column) * weight for column in zip(*rows, strict=True)] or [0.0] * dimensions
            self._table = [_unit(_difference(row, self._center)) for row in rows]

    def find(self, vector: Sequence[float], count: int, min_cosine: float) -> list[tuple[Key, float]]:
        """Return at most `count` keys with their cosines, the nearest first, none below `min_cosine`."""
        if not self._keys or not any(vector):
            return []
        query = _unit(_difference(vector, self._center))
        if self._numpy is None:
            cosines = [sum(map(mul, row, query)) for row in self._table]
            rows = [row for row, cosine in enumerate(cosines) if cosine >= min_cosine]
        else:
            # `@` would start OpenBLAS's threads for half a millisecond, and wait for them on a busy machine.
            cosines = self._numpy.einsum("ij,j->i", self._table, self._numpy.array(query, dtype="float32"))
            found = self._numpy.flatnonzero(cosines >= min_cosine)
            if len(found) > count:
                found = found[self._numpy.argpartition(-cosines[found], count)[:count]]
            rows = found.tolist()
        near = [(-float(cosines[row]), row) for row in rows]
        return [(self._keys[row], -negative) for negative, row in sorted(near)[:count]]


def _unit(vector: Sequence[float]) -> list[float]:
    length = max(sum(number * number for number in vector) ** 0.5, 1e-12)
    return [number / length for number in vector]


def _difference(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [float(a) - float(b) for a, b in zip(one, other, strict=True)]
