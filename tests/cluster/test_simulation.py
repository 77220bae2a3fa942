"""The simulation gives the numbers of docs/cluster.md, and carrel's rule for placement what it promises."""

from __future__ import annotations

import re
from pathlib import Path

from bench.simulation import RULES, capacity, place

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()


def test_the_table_of_the_page_is_computed() -> None:
    for column, live in enumerate((1_000, 10_000, 100_000)):
        for row, value in capacity(live).items():
            if row.endswith("per second"):
                continue
            [cells] = re.findall(rf"^\| {re.escape(row)}[^|]*\| (.*) \|$", PAGE, re.MULTILINE)
            shown = float(cells.split(" | ")[column].replace(",", ""))
            assert abs(shown - value) <= 0.051 * value, (row, live, shown, value)


def test_few_nodes_prepare_a_sample_and_none_is_overloaded() -> None:
    found = {name: place(rule, creates=4_000) for name, rule in RULES.items()}
    (fullest, preparations), (_, everywhere) = found["emptier of two among eight (carrel)"], found["random"]
    assert fullest < 1.3
    assert preparations < everywhere * 0.7
