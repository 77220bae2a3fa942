"""Datasets made from what people have: SWE-bench files, and the history of a repository."""
