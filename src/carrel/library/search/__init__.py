"""Search over what the library holds, by words and by meaning."""

from carrel.library.search.blending import Hit
from carrel.library.search.index import Entry, Index

__all__ = ["Entry", "Hit", "Index"]
