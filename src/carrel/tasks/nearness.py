"""Pure: the name that was meant, for a message about one that is not there."""

import difflib
from collections.abc import Collection, Iterable

_NEARLY = 0.8
"""How like a known field an unknown one is before it is taken for a slip of the pen."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or where nothing is like it the first few names there are."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 3)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    if not names:
        return "; it is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"; there is {', '.join(names[:5])}{more}"


def refuse_slips(given: object, known: Collection[str]) -> None:
    """ValueError for a field that is nearly the name of a known one; others may be somebody's own."""
    if not isinstance(given, dict):
        return
    for name in given.keys() - set(known):
        near = difflib.get_close_matches(str(name).lower(), known, 1, _NEARLY)
        if near:
            raise ValueError(f"there is no field {name!r}; did you mean {near[0]!r}?")
