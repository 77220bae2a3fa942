"""The journal of an import: a line for each commit that was judged, so that an import that was stopped can go on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carrel.tasks.imports.judging import Lists


class Journal:
    """Lies beside the new dataset until that is complete; one of other settings is not continued."""

    def __init__(self, into: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.file = into.with_name(f".{into.name}.import.jsonl")
        self.judged: dict[str, Lists] = {}
        """By commit."""
        facts = json.dumps(settings, sort_keys=True, default=str)
        head = json.dumps({"settings": hashlib.sha256(facts.encode()).hexdigest()})
        if resume and self.file.is_file():
            first, _, rest = self.file.read_text(encoding="utf-8").partition("\n")
            if first == head:
                self._read(rest)
                return
        self.file.write_text(f"{head}\n", encoding="utf-8")

    def _read(self, text: str) -> None:
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                commit = entry.pop("commit")
                self.judged[commit] = Lists(**entry)
            except (ValueError, TypeError, KeyError):
                continue  # a line that was cut when the program was ended; its commit is judged again

    def add(self, commit: str, lists: Lists) -> None:
        if not lists.may_change:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'commit': commit, **asdict(lists)})}\n")

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)
