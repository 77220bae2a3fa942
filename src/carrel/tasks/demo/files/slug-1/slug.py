"""Titles as parts of an address: `slug("Hello, World")` is `hello-world`."""

import re


def slug(title: str, longest: int = 60) -> str:
    """Lower case, words joined by `-`, no longer than asked for."""
    words = re.findall(r"[a-z0-9]+", title.lower())
    return "-".join(words)[:longest]
