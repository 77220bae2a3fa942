"""Texts as vectors: near each other when they have a similar meaning."""

from carrel.embedding.embedder import Embedder, EmbedderOption, choose_embedder
from carrel.embedding.nearest import NearestVectors, pack_vectors
from carrel.embedding.word_vectors import WordVectors

__all__ = ["Embedder", "EmbedderOption", "NearestVectors", "WordVectors", "choose_embedder", "pack_vectors"]
