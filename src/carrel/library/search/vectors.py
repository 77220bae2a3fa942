"""Vectors kept by what they are of, so that no text is embedded twice, and which of them are near to another."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carrel.meaning.seam import Vectors

FORMAT = b"carrel vectors 1\n"
_DIGEST = 16
_SPARE = 1000
_FEW = 20


def digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()


class VectorTable:
    """Vectors of one embedder by the digest of their text; a byte per number, as they are stored."""

    def __init__(self, dimensions: int) -> None:
        import numpy  # noqa: PLC0415 - only searching by meaning needs it

        self._dimensions = dimensions
        self._rows: dict[bytes, int] = {}
        self._table: Any = numpy.zeros((0, dimensions), dtype=numpy.int8)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def add(self, keys: Sequence[bytes], vectors: "Vectors") -> None:
        """Take new vectors; their direction is kept to about half a degree, their length is not."""
        import numpy  # noqa: PLC0415

        longest = numpy.maximum(numpy.abs(vectors).max(axis=1, keepdims=True), 1e-12)
        self._take(keys, numpy.rint(vectors / longest * 127).astype(numpy.int8))

    def _take(self, keys: Sequence[bytes], packed: Any) -> None:
        import numpy  # noqa: PLC0415

        new = [row for row, key in enumerate(keys) if key not in self._rows]
        for row in new:
            self._rows[keys[row]] = len(self._rows)
        self._table = numpy.concatenate([self._table, packed[new]])

    def unit_vectors(self, keys: Sequence[bytes]) -> Any:
        """A row of length 1 for each key, all of which are here."""
        import numpy  # noqa: PLC0415

        chosen = self._table[[self._rows[key] for key in keys]].astype(numpy.float32)
        return chosen / numpy.maximum(numpy.linalg.norm(chosen, axis=1, keepdims=True), 1e-12)

    def encoded(self) -> bytes:
        """As one object: a line that names the format, how many and how long, then all digests, then all vectors."""
        sizes = f"{len(self._rows)} {self._dimensions}\n".encode()
        return b"".join([FORMAT, sizes, *self._rows, self._table.tobytes()])

    def absorb(self, data: bytes) -> bool:
        """Take what another table had; False, and nothing taken, when this is none or of another kind."""
        import numpy  # noqa: PLC0415

        if not data.startswith(FORMAT):
            return False
        sizes = data[len(FORMAT) : len(FORMAT) + 40].split(b"\n", 1)[0]
        try:
            count, dimensions = map(int, sizes.split())
        except ValueError:
            return False
        start = len(FORMAT) + len(sizes) + 1
        middle = start + count * _DIGEST
        if count < 0 or dimensions != self._dimensions or len(data) != middle + count * dimensions:
            return False
        keys = [data[at : at + _DIGEST] for at in range(start, middle, _DIGEST)]
        self._take(keys, numpy.frombuffer(data, numpy.int8, offset=middle).reshape(count, dimensions))
        return True

    def without_old(self, wanted: Iterable[bytes]) -> "VectorTable":
        """This table, or one of the wanted alone when most of it is of texts that are gone."""
        kept = [key for key in dict.fromkeys(wanted) if key in self._rows]
        if len(self) <= 2 * len(kept) + _SPARE:
            return self
        smaller = VectorTable(self._dimensions)
        smaller._take(kept, self._table[[self._rows[key] for key in kept]])
        return smaller


class Nearness:
    """The entries' vectors in one matrix, and how near each is to a question.

    With `leave_common`, what all entries have in common is taken away from them and from the question, as it tells
    none of them apart; of few entries less of it, because they may have something in common by chance."""

    def __init__(self, keys: Sequence[str], vectors: Any, *, leave_common: bool = False) -> None:
        import numpy  # noqa: PLC0415

        self.keys = list(keys)
        weight = 1 / (len(self.keys) + _FEW) if leave_common else 0
        self._common = vectors.sum(axis=0) * numpy.float32(weight)
        self._vectors = self._unit(vectors - self._common)

    def ask(self, vector: Any, count: int, least: float) -> list[tuple[str, float]]:
        """The nearest entries, at most `count`, none farther than a cosine of `least`."""
        import numpy  # noqa: PLC0415

        if not self.keys or not vector.any():
            return []
        # `@` would call OpenBLAS's threads for this half a millisecond, and wait for them on a busy machine.
        near = numpy.einsum("ij,j->i", self._vectors, self._unit((vector - self._common)[None])[0])
        chosen = numpy.flatnonzero(near >= least)
        if len(chosen) > count:
            chosen = chosen[numpy.argpartition(-near[chosen], count)[:count]]
        hits = [(self.keys[row], float(near[row])) for row in chosen.tolist()]
        return sorted(hits, key=lambda hit: (-hit[1], hit[0]))

    @staticmethod
    def _unit(vectors: Any) -> Any:
        import numpy  # noqa: PLC0415

        return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
