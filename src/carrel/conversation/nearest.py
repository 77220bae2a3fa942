"""Vectors in memory, and which of them are nearest to another."""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from carrel.storage.catalogue import Found

if TYPE_CHECKING:
    from carrel.meaning.seam import Vectors

_GROWTH = 1.5


def packed(vectors: "Vectors") -> list[bytes]:
    """Each vector in a byte per dimension; its length is lost, its direction kept to about half a degree."""
    import numpy  # noqa: PLC0415 - only searching by meaning needs it

    longest = numpy.maximum(numpy.abs(vectors).max(axis=1, keepdims=True), 1e-12)
    return [row.tobytes() for row in numpy.rint(vectors / longest * 127).astype(numpy.int8)]


class Nearest:
    """A table of unit vectors that is asked far more often than it changes; safe to use from any thread."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._guard = threading.Lock()
        self._rows: dict[Found, int] = {}
        self._places: list[Found] = []
        self._table: Any = None

    def load(self, vectors: Sequence[tuple[Found, bytes]]) -> None:
        """Begin again with these."""
        with self._guard:
            self._places = [place for place, _ in vectors]
            self._rows = {place: row for row, place in enumerate(self._places)}
            self._table = self._unpacked(b"".join([vector for _, vector in vectors]))

    def apply(self, source: str, vectors: Mapping[int, bytes | None], *, forget: bool = False) -> None:
        """Take what is new of a source; a vector that is None is taken away, with `forget` all it had before."""
        with self._guard:
            if self._table is None:
                return
            import numpy  # noqa: PLC0415

            gone = [place for place in self._rows if place.source == source] if forget else []
            gone += [Found(source, number) for number, vector in vectors.items() if vector is None]
            for place in gone:
                if (row := self._rows.pop(place, None)) is not None:
                    self._table[row] = 0
            for number, vector in vectors.items():
                if vector is None:
                    continue
                place = Found(source, number)
                row = self._rows.setdefault(place, len(self._places))
                if row == len(self._places):
                    self._places.append(place)
                if row >= len(self._table):
                    larger = numpy.zeros((int(row * _GROWTH) + 64, self._dimensions), dtype=numpy.float32)
                    larger[: len(self._table)] = self._table
                    self._table = larger
                self._table[row] = self._unpacked(vector)[0]

    def _unpacked(self, vectors: bytes) -> Any:
        import numpy  # noqa: PLC0415

        table = numpy.frombuffer(vectors, dtype=numpy.int8).astype(numpy.float32).reshape(-1, self._dimensions)
        lengths = numpy.linalg.norm(table, axis=1, keepdims=True)
        table /= numpy.maximum(lengths, 1e-12)
        return table

    def ask(self, vector: Any, count: int, least: float) -> list[tuple[Found, float]]:
        """The nearest places, at most `count`, none farther than a cosine of `least`; the nearest first."""
        import numpy  # noqa: PLC0415

        with self._guard:
            if self._table is None or not self._places:
                return []
            near = self._table[: len(self._places)] @ vector
            chosen = numpy.flatnonzero(near >= least)
            if len(chosen) > count:
                chosen = chosen[numpy.argpartition(-near[chosen], count)[:count]]
            ordered = sorted(chosen.tolist(), key=lambda row: (-float(near[row]), self._places[row]))
            return [(self._places[row], float(near[row])) for row in ordered]
