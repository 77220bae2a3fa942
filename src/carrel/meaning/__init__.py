"""Texts as vectors: near each other when they mean the same, whatever the words."""

from carrel.meaning.choosing import better_embedder, default_embedder, minilm_folder, mpnet_folder, plain_embedder
from carrel.meaning.minilm import MiniLMEmbedder
from carrel.meaning.mpnet import MPNetEmbedder
from carrel.meaning.seam import Embedder, KnowsWords
from carrel.meaning.static import StaticEmbedder

__all__ = [
    "Embedder",
    "KnowsWords",
    "MPNetEmbedder",
    "MiniLMEmbedder",
    "StaticEmbedder",
    "better_embedder",
    "default_embedder",
    "minilm_folder",
    "mpnet_folder",
    "plain_embedder",
]
