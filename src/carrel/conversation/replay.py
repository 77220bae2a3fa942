"""Pure: entries in, the messages the model sees out."""

from collections.abc import Sequence

from carrel.conversation.entries import UNREADABLE, aside_of
from carrel.conversation.messages import ConversationMessage, blocks_of, build_message, meta_of, text_block

Numbered = tuple[int, ConversationMessage]
"""An entry and its sequence number; 0 for a message that stands in no line of its own."""

COMPACT_ACKNOWLEDGEMENT = "Understood. I have read the summary of our conversation so far and go on from there."

_NOT_SAID = ("compact", "rewind", UNREADABLE)


def apply_compact(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """The newest compact and all before it, replaced by the summary and an acknowledgement."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "compact":
            return [*_summary(messages[index]), *messages[index + 1 :]]
    return messages


def apply_rewind(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Each rewind, in order, cuts the list as it is at that moment."""
    shown: list[ConversationMessage] = []
    for message in messages:
        if message.get("role") == "rewind":
            cut = cut_of(message)
            if cut is not None:
                del shown[cut:]
        else:
            shown.append(message)
    return shown


def cut_of(entry: ConversationMessage) -> int | None:
    """How many messages a rewind leaves, or None when it does not say (it then cuts nothing)."""
    cut = meta_of(entry).get("rewind_to")
    return cut if type(cut) is int and cut >= 0 else None


def jump_of(entry: ConversationMessage) -> int | None:
    """The entry that a rewind goes back to, or None when it is a plain cut."""
    jump = meta_of(entry).get("to_seq")
    return jump if type(jump) is int and jump >= 0 else None


def kept_from(entry: ConversationMessage) -> int | None:
    """From which entry on a compact keeps messages as they are, or None when it keeps none."""
    keep = meta_of(entry).get("keep_from_seq")
    return keep if type(keep) is int and keep > 0 else None


def _summary(compact: ConversationMessage) -> list[ConversationMessage]:
    text = next((str(block.get("text") or "") for block in blocks_of(compact) if block.get("type") == "text"), "")
    return [
        build_message("user", [text_block(f"[Conversation Summary]\n\n{text}")], meta={"synthetic": True}),
        build_message("assistant", [text_block(COMPACT_ACKNOWLEDGEMENT)], meta={"synthetic": True}),
    ]


def visible(path: Sequence[Numbered]) -> list[Numbered]:
    """What is visible after these entries, oldest first; jumps have been followed already (see `Backwards`)."""
    last = next((i for i in range(len(path) - 1, -1, -1) if path[i][1].get("role") == "compact"), None)
    if last is None:
        return _cut(path, [])
    compact = path[last][1]
    shown: list[Numbered] = [(0, message) for message in _summary(compact)]
    keep = kept_from(compact)
    if keep is not None:
        shown += [(seq, message) for seq, message in visible(path[:last]) if seq >= keep]
    return _cut(path[last + 1 :], shown)


def _cut(path: Sequence[Numbered], shown: list[Numbered]) -> list[Numbered]:
    for numbered in path:
        entry = numbered[1]
        role = entry.get("role")
        if role == "rewind":
            cut = cut_of(entry)
            if cut is not None:
                del shown[cut:]
        elif role != UNREADABLE:
            shown.append(numbered)
    return shown


def visible_after(entries: Sequence[Numbered], seq: int | None = None) -> list[Numbered]:
    """What was visible right after entry `seq` (None: after all of them), jumps followed."""
    walk = Backwards(seq)
    for number, entry in reversed(entries):
        walk.take(number, [entry])
    return visible(walk.path())


class Backwards:
    """Fed a log from its end, keeps what the visible conversation needs and says when it has enough.

    So that opening a long session costs what is visible, not what was ever said."""

    def __init__(self, until: int | None = None) -> None:
        self.enough = until == 0
        self.problems: list[str] = []
        self._until = until
        self._keep: int | None = None
        self._pieces: list[list[Numbered]] = []

    def take(self, first_seq: int, entries: Sequence[ConversationMessage]) -> None:
        """The next older entries, in order; the first of them has `first_seq`."""
        last_seq = first_seq + len(entries) - 1
        if self._until is None and self._keep is None and not any(entry.get("role") in _NOT_SAID for entry in entries):
            self._pieces.append(list(zip(range(first_seq, last_seq + 1), entries, strict=True)))
            return
        piece: list[Numbered] = []
        for offset in range(len(entries) - 1, -1, -1):
            if self.enough:
                break
            if self._wanted(first_seq + offset, entries[offset]):
                piece.append((first_seq + offset, entries[offset]))
        piece.reverse()
        self._pieces.append(piece)

    def _wanted(self, seq: int, entry: ConversationMessage) -> bool:
        if self._until is not None and seq > self._until:
            return False
        if self._keep is not None and seq < self._keep:
            self.enough = True
            return False
        role = entry.get("role")
        if role == "rewind":
            return self._wanted_rewind(seq, entry)
        if role == "compact":
            self._keep = kept_from(entry)
            self.enough = self._keep is None
        elif role == UNREADABLE:
            reason = meta_of(entry).get("reason")
            if reason != "blank":
                self.problems.append(f"line {seq} is left out: {reason}")
            return False
        return True

    def _wanted_rewind(self, seq: int, entry: ConversationMessage) -> bool:
        if aside_of(entry) is not None:
            return False
        jump = jump_of(entry)
        if jump is not None and jump < seq:
            self._until = jump
            self.enough = jump == 0
            return False
        if cut_of(entry) is None:
            self.problems.append(f"line {seq} is a rewind that does not say where to; it changes nothing")
            return False
        # A cut counts from the start of what was visible then, so the start is needed.
        self._keep = None
        return True

    def path(self) -> list[Numbered]:
        """The entries that count, oldest first."""
        return [numbered for piece in reversed(self._pieces) for numbered in piece]
