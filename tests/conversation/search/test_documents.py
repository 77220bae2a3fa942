"""Which entries of a session are embedded, and which of a fork are indexed."""

from carrel.conversation.search.documents import IndexedSession, entries_to_embed, first_own_entries


def test_the_first_own_entry_of_each_fork() -> None:
    def session(*forks: tuple[str, int, int], head: str = "h", next_seq: int = 100) -> IndexedSession:
        return IndexedSession(first_digest=head, next_seq=next_seq, forks=list(forks))

    parent, child, other = session(), session(("p", 9, 10)), session(("p", 20, 21))
    assert first_own_entries({"p": parent, "c": child, "o": other}) == {"c": 10, "o": 21}
    assert first_own_entries({"c": child, "o": other}) == {"c": 10, "o": 1}
    assert first_own_entries({"c": child}) == {"c": 1}
    # The parent was cleared and has another log now.
    assert first_own_entries({"p": session(head="x"), "c": child}) == {"c": 1}
    assert first_own_entries({"p": session(next_seq=5), "c": child}) == {"c": 1}
    # A fork of a fork, with the parent deleted but not the grandparent.
    grandchild = session(("p", 9, 10), ("c", 30, 31))
    assert first_own_entries({"p": parent, "g": grandchild}) == {"g": 10}
    assert first_own_entries({"p": parent, "c": child, "g": grandchild}) == {"c": 10, "g": 31}
    assert first_own_entries({"s": session(("s", 9, 10))}) == {"s": 1}


def test_the_first_and_the_newest_entries_are_embedded() -> None:
    assert entries_to_embed([0, 1, 3, 5]) == [0, 1, 3, 5]
    assert entries_to_embed(list(range(100))) == [0, 1, 2, 3, 4, *range(88, 100)]
    step_by_step: list[int] = []
    for number in range(1, 100):
        step_by_step = entries_to_embed([*step_by_step, number])
    assert step_by_step == [1, 2, 3, 4, *range(88, 100)]
