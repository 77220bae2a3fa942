"""Nothing that code inside or a foreign server says keeps the host at work for long: the work is counted, not timed."""

import random

import pytest

from carrel.errors import ToolNotFoundError
from carrel.text import did_you_mean
from tests.library.tools.making import catalog

WC = "name: wc\ncommand: wc\nstdin: text"


async def test_a_name_of_millions_of_letters_is_not_looked_at_long() -> None:
    tools = catalog(WC)
    for name in ("a" * 3_000_000, "wc." + "b" * 3_000_000, "." * 3_000_000):
        with pytest.raises(ToolNotFoundError) as missing:
            await tools.handle(f"tools.{name}", [], {})
        assert len(str(missing.value)) < 500


def test_near_names_are_found_among_thousands_of_long_ones() -> None:
    letters = random.Random(1)
    names = ["".join(letters.choices("abcdefgh_", k=90)) for _ in range(8000)]
    assert did_you_mean(names[5000][:-2] + "xx", names) == f"; did you mean {names[5000]}?"
    assert len(did_you_mean("x" * 3_000_000, [*names, "y" * 3_000_000])) < 1000
