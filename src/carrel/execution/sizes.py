"""Pure: sizes as people write them, in bytes."""

import re

from carrel.errors import ConfigurationError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_in_bytes(text: str) -> int:
    """`512MiB`, `2GiB`, `2g`, or a plain number of bytes."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise ConfigurationError(f"{text!r} is no size: write a whole number and a unit, as in 512MiB or 2GiB")
    return int(found[1]) * _UNITS[found[2]]
