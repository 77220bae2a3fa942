"""Pure: the name that was meant, for a message about one that is not there."""

import difflib
from collections.abc import Iterable


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
