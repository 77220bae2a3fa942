"""Texts as vectors: near each other when they have a similar meaning."""

from carrel.embedding.embedder import Embedder, EmbedderOption, WordVectors, choose_embedder
from carrel.embedding.nearest import NearestVectors, pack_vectors

__all__ = ["Embedder", "EmbedderOption", "NearestVectors", "WordVectors", "choose_embedder", "pack_vectors"]
