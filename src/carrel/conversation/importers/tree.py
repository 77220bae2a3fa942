"""Pure: lines that name their parent, and which of them are the conversation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Node:
    """What is kept of a line while its file is read for the first time."""

    line: int
    id: str
    parent: str | None
    speaks: bool
    """Whether it is part of what was said; others only hold the chain together."""
    goes_on: bool = False
    """Without a parent it follows the line before it (a compaction starts a new chain on purpose)."""
    message_id: str = ""
    """Pieces of one answer share it."""
    calls: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    """For a compaction: the lines that stay in view after it."""


class Tree:
    """The lines of one conversation with all its branches, in file order."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._by_id = {node.id: node for node in nodes}
        self._parent: dict[str, str | None] = {}
        before: str | None = None
        for node in nodes:
            known = node.parent if node.parent in self._by_id and node.parent != node.id else None
            # A parent that is not there was on an unreadable line, or in another file: the line before takes its place.
            lost = known is None and (node.parent is not None or node.goes_on)
            self._parent[node.id] = before if lost else known
            before = node.id

    def last(self) -> Node | None:
        return next((node for node in reversed(self.nodes) if node.speaks), None)

    def find(self, id_: object) -> Node | None:
        return self._by_id.get(id_) if isinstance(id_, str) else None

    def path(self, leaf: Node) -> list[Node]:
        """From the first line to `leaf`, with what belongs to it though the chain passes it by."""
        on_path: dict[str, Node] = {}
        at: str | None = leaf.id
        while at is not None and at not in on_path:
            on_path[at] = self._by_id[at]
            at = self._parent[at]
        self._take_in_parallel_calls(on_path)
        self._take_in_compactions(on_path, leaf)
        return sorted(on_path.values(), key=lambda node: node.line)

    def _take_in_parallel_calls(self, on_path: dict[str, Node]) -> None:
        """Calls made side by side are siblings, each with its result as a child; a chain sees only one of them."""
        said = {node.message_id for node in on_path.values() if node.message_id}
        if not said:
            return
        calls: set[str] = set()
        for node in self.nodes:
            if node.message_id in said:
                on_path.setdefault(node.id, node)
                calls.update(node.calls)
        answered = {id_ for node in on_path.values() for id_ in node.answers}
        for node in self.nodes:
            ours = node.answers and calls.issuperset(node.answers) and answered.isdisjoint(node.answers)
            if ours and node.id not in on_path:
                on_path[node.id] = node
                answered.update(node.answers)

    def _take_in_compactions(self, on_path: dict[str, Node], leaf: Node) -> None:
        """After a compaction that kept messages in view the chain goes on from those, past the compaction itself."""
        added: set[str] = set()
        for node in self.nodes:
            if node.line > leaf.line or node.id in on_path:
                continue
            follows = self._parent[node.id] in added and (node.goes_on or not node.speaks)
            if follows or any(id_ in on_path for id_ in node.keeps):
                on_path[node.id] = node
                added.add(node.id)

    def branches(self, taken: Iterable[Node]) -> list[Node]:
        """The last line of each branch that is not among those taken."""
        taken_ids = {node.id for node in taken}
        speaker: dict[str, str | None] = {}
        followed: set[str] = set()
        ends: list[Node] = []
        for node in self.nodes:
            parent = self._parent[node.id]
            above = speaker.get(parent) if parent is not None else None
            speaker[node.id] = node.id if node.speaks else above
            if node.speaks and node.id not in taken_ids:
                ends.append(node)
                if above is not None:
                    followed.add(above)
        return [node for node in ends if node.id not in followed]
