"""Datasets of a few lines, written to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def dataset_folder(folder: Path, samples: list[dict[str, Any]]) -> Path:
    """A dataset of these samples; files that they name are put there by who wants them."""
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return folder
