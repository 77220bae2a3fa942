"""What an import hands over: a session in our words, and an account of every line it was made from."""

from dataclasses import dataclass, field
from typing import Any

from carrel.conversation.messages import ConversationMessage

OTHER_BRANCH = "other branch"
SUB_SESSION = "sub-session"
BLANK_LINE = "blank line"

COMMON_REASONS = {
    OTHER_BRANCH: "a branch the conversation went back from; all_branches=True brings it as a session of its own",
    SUB_SESSION: "belongs to a sub-session, which is imported on its own",
    BLANK_LINE: "empty",
}


@dataclass
class ImportReport:
    """Where every line of a session file went: `lines` is always the sum of the five counts below it."""

    path: str
    kind: str
    source_id: str = ""
    lines: int = 0
    imported: int = 0
    """Lines that became an entry of the log."""
    merged: int = 0
    """Lines whose content went into the entry of another line."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Lines of a known kind that carry no conversation; `reasons` says why."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Lines of a kind, or in a shape, that we do not know."""
    unreadable: list[int] = field(default_factory=list)
    """The numbers of the lines that are no JSON object."""
    reasons: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What else a person should know, a sentence each."""
    refused: str | None = None
    """Why nothing could be read of this file; only when a whole folder is imported."""
    session_id: str | None = None
    """Under which id it was stored; set by the store."""
    already_here: str | None = None
    """The session that an earlier import made of the same source; set by the store."""
    appended: int = 0
    """How many entries that session got now, because the source has grown."""

    @property
    def left_out(self) -> int:
        """Lines of branches that the conversation went back from."""
        return self.ignored.get(OTHER_BRANCH, 0)

    @property
    def accounted(self) -> int:
        return (
            self.imported + self.merged + sum(self.ignored.values()) + sum(self.unknown.values()) + len(self.unreadable)
        )

    def ignore(self, what: str, reason: str | None = None, lines: int = 1) -> None:
        self.ignored[what] = self.ignored.get(what, 0) + lines
        self.reasons.setdefault(what, reason or COMMON_REASONS.get(what, ""))

    def not_known(self, what: str) -> None:
        self.unknown[what] = self.unknown.get(what, 0) + 1


@dataclass
class Imported:
    """One session as it was read; without messages there is nothing to store, and the report says why."""

    kind: str
    source_id: str
    report: ImportReport
    title: str = ""
    provider: str = ""
    model: str = ""
    cwd: str = ""
    created_at: str | None = None
    messages: list[ConversationMessage] = field(default_factory=list)
    """Log entries in order; the sequence numbers inside them count from 1, the first of this list."""
    parent: str | None = None
    """The source id of the session that this one belongs to or branched from; it comes before in the same import."""
    forked_at: int | None = None
    """How many entries at the start are the parent's own, for a branch; None for any other session."""
    named_by_file: bool = False
    """The source id is but the name of the file, which another session may have too."""
    meta: dict[str, Any] = field(default_factory=dict)
    """More for `meta.json`: only from a folder of our own format."""
