"""Has a model read the texts of `collect_texts.py`, for `make_word_vectors.py`.

    python scripts/read_texts.py MODEL TEXTS OUT [--bytes]

- MODEL: the folder of a sentence model, as in `$CARREL_HOME/models` with the `config.json` of its package beside;
- TEXTS: what `collect_texts.py` wrote;
- OUT: a file for the vectors, the words' first; what it has already is not read again.

Needs torch, transformers, onnx and onnxruntime, which carrel does not. With `--bytes` most of the weights are rounded
to bytes: MPNet takes half an hour on two cores then, at a cosine of 0.992 to what it says in full, 0.967 at worst. Not
rounded are the matrices after the wide middle of a layer: a few numbers there are so large that little is left of the
others."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from tokenizers import Tokenizer
from transformers import AutoModel

LONGEST = 96
AT_ONCE = 2048
"""Tokens."""


class Averaged(torch.nn.Module):
    """The average of what the tokens mean where they stand, of length 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Any, mask: Any) -> Any:
        means = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state.mean(1)
        return torch.nn.functional.normalize(means, dim=1)


def made(model: Path, folder: Path, *, in_bytes: bool) -> onnxruntime.InferenceSession:
    full = folder / "full.onnx"
    tokens = torch.tensor([[0, 5, 6, 2], [0, 6, 5, 2]])
    torch.onnx.export(
        Averaged(AutoModel.from_pretrained(model, attn_implementation="eager", local_files_only=True).eval()),
        (tokens, torch.ones_like(tokens)),
        str(full),
        input_names=["tokens", "mask"],
        output_names=["vectors"],
        dynamic_axes={"tokens": {0: "texts", 1: "length"}, "mask": {0: "texts", 1: "length"}, "vectors": {0: "texts"}},
        dynamo=False,
        opset_version=17,
    )
    if not in_bytes:
        return onnxruntime.InferenceSession(str(full))
    nodes = [node.name for node in onnx.load(str(full)).graph.node if node.op_type == "MatMul"]
    narrow = [name for name in nodes if "output/dense" in name and "attention" not in name]
    rounded = folder / "rounded.onnx"
    quantize_dynamic(full, rounded, weight_type=QuantType.QInt8, per_channel=True, nodes_to_exclude=narrow)
    return onnxruntime.InferenceSession(str(rounded))


def read(session: onnxruntime.InferenceSession, tokenizer: Tokenizer, texts: list[str]) -> Any:
    """Texts of one length at a time, so that nothing is padded."""
    tokens = [found.ids for found in tokenizer.encode_batch_fast(texts)]
    order = sorted(range(len(texts)), key=lambda row: len(tokens[row]))
    vectors: Any = None
    start, said = 0, time.monotonic()
    while start < len(order):
        length = len(tokens[order[start]])
        some = order[start : start + max(AT_ONCE // length, 1)]
        rows = [row for row in some if len(tokens[row]) == length]
        given = numpy.array([tokens[row] for row in rows], dtype=numpy.int64)
        found = session.run(None, {"tokens": given, "mask": numpy.ones_like(given)})[0]
        if vectors is None:
            vectors = numpy.zeros((len(texts), found.shape[1]), dtype=numpy.float16)
        vectors[rows] = found
        start += len(rows)
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"{start:,} of {len(texts):,} texts read", flush=True)
    return vectors


def main(model: Path, texts: Path, out: Path, *, in_bytes: bool) -> None:
    wanted = json.loads(texts.read_text())
    wanted = [*wanted["words"], *wanted["texts"]]
    have: dict[str, Any] = {}
    if out.exists():
        with numpy.load(out) as file:
            have = dict(zip(file["texts"].tolist(), file["vectors"], strict=True))
    missing = [text for text in dict.fromkeys(wanted) if text not in have]
    if missing:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(LONGEST)
        with tempfile.TemporaryDirectory() as folder:
            session = made(model, Path(folder), in_bytes=in_bytes)
            have |= zip(missing, read(session, tokenizer, missing), strict=True)
    numpy.savez(out, texts=numpy.array(wanted), vectors=numpy.array([have[text] for text in wanted]))


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != "--bytes"]
    main(*map(Path, named), in_bytes="--bytes" in sys.argv)
