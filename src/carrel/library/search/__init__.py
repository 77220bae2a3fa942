"""Search over the tools, workflows and artifacts of a library."""

from carrel.library.search.index import LibrarySearch, SearchEntry, SearchMatch

__all__ = ["LibrarySearch", "SearchEntry", "SearchMatch"]
