"""Layers of attention in numpy, without torch: what a model that reads sentences makes of the tokens of a text."""

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from carrel.meaning.seam import encoded, speakable

if TYPE_CHECKING:
    from carrel.meaning.seam import Vectors

_HEADS = 12
LONGEST = 256
_TOKENS_AT_ONCE = 256
_WIDTH = 384
_ROWS = 32
_COLUMNS = 16
"""What is multiplied at once: 2^18 multiplications at most, from which on OpenBLAS calls its threads."""
_ASKING = 32
"""How many tokens ask at once, in attention; the same for up to 256 others that answer."""
_loading = threading.Lock()


class Norm(NamedTuple):
    weight: Any
    bias: Any
    least: float
    """Is added to what is divided by."""


class Dense(NamedTuple):
    blocks: Any
    """The matrix, a row for each number that comes out, cut into pieces of `_ROWS` and `_WIDTH`: [part, block, …]."""
    bias: Any


class Layer(NamedTuple):
    asked: Dense
    keys: Dense
    values: Dense
    mixed: Dense
    mixed_norm: Norm
    wide: Dense
    narrow: Dense
    narrow_norm: Norm


class Model(NamedTuple):
    words: Any
    places: Any
    """The vector of each place in a text."""
    norm: Norm
    layers: tuple[Layer, ...]
    apart: Any = None
    """What each head makes of how far two tokens are apart, [head, asked, key]; None where it makes nothing of it."""


class Weights:
    """The tensors of a file, by name, as the parts of a model."""

    def __init__(self, file: Path, least: float) -> None:
        self._tensors = _mapped(file)
        self._least = least

    def __getitem__(self, name: str) -> Any:
        return self._tensors[f"{name}.weight"]

    def dense(self, name: str) -> Dense:
        bias = self._tensors[f"{name}.bias"]
        return Dense(self[name].reshape(len(bias) // _ROWS, _ROWS, -1, _WIDTH).transpose(2, 0, 1, 3), bias)

    def norm(self, name: str) -> Norm:
        return Norm(self[name], self._tensors[f"{name}.bias"], self._least)

    def layers(self, attention: Sequence[str], norm: str) -> tuple[Layer, ...]:
        """All of them; the four parts of attention, and the norm after them, are called so in each."""
        numbers = {int(name.split(".")[2]) for name in self._tensors if name.startswith("encoder.layer.")}
        return tuple(self._layer(f"encoder.layer.{number}", attention, norm) for number in sorted(numbers))

    def _layer(self, at: str, attention: Sequence[str], norm: str) -> Layer:
        asked, keys, values, mixed = (self.dense(f"{at}.attention.{name}") for name in attention)
        wide, narrow = self.dense(f"{at}.intermediate.dense"), self.dense(f"{at}.output.dense")
        mixed_norm, narrow_norm = self.norm(f"{at}.attention.{norm}"), self.norm(f"{at}.output.LayerNorm")
        return Layer(asked, keys, values, mixed, mixed_norm, wide, narrow, narrow_norm)


class Reader(ABC):
    """An embedder of such layers: gives each text the average of what its tokens mean where they stand."""

    name: str
    dimensions: int

    def __init__(self, folder: Path) -> None:
        """`folder`: where the weights and the tokenizer are."""
        self.folder = folder
        self._weights = folder / "model.safetensors"
        self._tokenizer = folder / "tokenizer.json"
        self._loaded: tuple[Any, Model] | None = None

    @property
    def installed(self) -> bool:
        try:
            return self._weights.is_file() and self._tokenizer.is_file()
        except PermissionError:  # of somebody else
            return False

    def embed(self, texts: Sequence[str]) -> "Vectors":
        import numpy  # noqa: PLC0415 - a tenth of a second, and only searching by meaning needs it

        tokenizer, model = self._load()
        vectors = numpy.zeros((len(texts), self.dimensions), dtype=numpy.float32)
        tokens = [tokens.ids for tokens in encoded(tokenizer, [speakable(text) for text in texts])]
        for rows in _batches([len(ids) if text.strip() else 0 for ids, text in zip(tokens, texts, strict=True)]):
            vectors[rows] = _read(model, [tokens[row] for row in rows])
        return vectors

    def _load(self) -> tuple[Any, Model]:
        with _loading:
            if self._loaded is None:
                from tokenizers import Tokenizer  # noqa: PLC0415 - a compiled package, for this only

                tokenizer = Tokenizer.from_file(str(self._tokenizer))
                tokenizer.no_padding()
                tokenizer.enable_truncation(LONGEST)
                self._loaded = tokenizer, self._model(self._weights)
            return self._loaded

    @abstractmethod
    def _model(self, weights: Path) -> Model:
        """The parts of the file, by what they are for."""


def _mapped(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file where they lie: read when touched, shared by all processes, never copied."""
    import numpy  # noqa: PLC0415

    content = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    size = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + size].tobytes())
    tensors = {}
    for name, about in header.items():
        if about.get("dtype") == "F32":
            start, end = (8 + size + offset for offset in about["data_offsets"])
            tensors[name] = content[start:end].view(numpy.ndarray).view(numpy.float32).reshape(about["shape"])
    return tensors


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows to be read together: of one length, so that nothing is padded and a text's company changes nothing."""
    rows = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: lengths[row])
    batch: list[int] = []
    for row in rows:
        if batch and (lengths[row] != lengths[batch[0]] or (len(batch) + 1) * lengths[row] > _TOKENS_AT_ONCE):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _read(model: Model, tokens: list[list[int]]) -> Any:
    """The vectors of texts of one length: each token's meaning where it stands, averaged.

    The state has a column for each token of each text, and weights come from the left: twice as quick as the other
    way round when there are few tokens."""
    import numpy  # noqa: PLC0415

    count, length = len(tokens), len(tokens[0])
    given = model.words[numpy.array(tokens)] + model.places[:length]
    state = _normed(numpy.ascontiguousarray(given.reshape(count * length, -1).T), model.norm)
    for layer in model.layers:
        mixed = _attended(state, layer, model.apart, count, length)
        state = _normed(_through(mixed, layer.mixed) + state, layer.mixed_norm)
        wide = _gelu(_through(state, layer.wide))
        state = _normed(_through(wide, layer.narrow) + state, layer.narrow_norm)
    vectors = state.reshape(-1, count, length).mean(axis=2).T
    return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _through(state: Any, dense: Dense) -> Any:
    """The matrix times the state, in pieces that one core does by itself.

    OpenBLAS gives what has more than 2^18 multiplications to a thread for each core, and they wait for each other:
    beside other busy processes a question took ten times as long."""
    import numpy  # noqa: PLC0415

    out = numpy.empty((len(dense.bias), state.shape[1]), dtype=numpy.float32)
    for start in range(0, state.shape[1], _COLUMNS):
        some = slice(start, start + _COLUMNS)
        pieces = dense.blocks @ state[:, some].reshape(len(dense.blocks), 1, _WIDTH, -1)
        out[:, some] = (pieces[0] if len(pieces) == 1 else pieces.sum(axis=0)).reshape(len(out), -1)
    out += dense.bias[:, None]
    return out


def _attended(state: Any, layer: Layer, apart: Any, count: int, length: int) -> Any:
    """What each token takes from the others of its text, head by head."""
    import numpy  # noqa: PLC0415

    def by_head(dense: Dense) -> Any:
        return _through(state, dense).reshape(_HEADS, -1, count, length).transpose(2, 0, 1, 3)

    asked, keys, values = by_head(layer.asked), by_head(layer.keys), by_head(layer.values)
    out = numpy.empty_like(values)
    scale = numpy.float32(1 / math.sqrt(asked.shape[2]))
    for start in range(0, length, _ASKING):
        some = slice(start, min(start + _ASKING, length))
        scores = asked[..., some].transpose(0, 1, 3, 2) @ keys
        scores *= scale
        if apart is not None:
            scores += apart[:, some, :length]
        scores -= scores.max(axis=-1, keepdims=True)
        numpy.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out[..., some] = values @ scores.transpose(0, 1, 3, 2)
    return out.transpose(1, 2, 0, 3).reshape(-1, count * length)


def _normed(state: Any, norm: Norm) -> Any:
    import numpy  # noqa: PLC0415

    state = state - state.mean(axis=0)
    state /= numpy.sqrt(numpy.einsum("ij,ij->j", state, state) / len(state) + norm.least)
    state *= norm.weight[:, None]
    state += norm.bias[:, None]
    return state


def _gelu(x: Any) -> Any:
    """x times the share of a normal distribution below x. numpy has no erf: Abramowitz and Stegun 7.1.26, to 1e-7."""
    import numpy  # noqa: PLC0415

    z = numpy.abs(x)
    z *= numpy.float32(math.sqrt(0.5))
    t = 1 / (1 + numpy.float32(0.3275911) * z)
    tail = numpy.float32(1.061405429) * t
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail += numpy.float32(factor)
        tail *= t
    numpy.multiply(z, z, out=z)
    numpy.negative(z, out=z)
    tail *= numpy.exp(z, out=z)
    # x·(1 - tail/2) above zero, x·tail/2 below.
    tail *= numpy.float32(0.5)
    return x * numpy.where(x > 0, 1 - tail, tail)
