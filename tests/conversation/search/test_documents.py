"""Which entries of a session are embedded."""

from carrel.conversation.search.documents import entries_to_embed


def test_the_first_and_the_newest_entries_are_embedded() -> None:
    assert entries_to_embed([0, 1, 3, 5]) == [0, 1, 3, 5]
    assert entries_to_embed(list(range(100))) == [0, 1, 2, 3, 4, *range(88, 100)]
    step_by_step: list[int] = []
    for number in range(1, 100):
        step_by_step = entries_to_embed([*step_by_step, number])
    assert step_by_step == [1, 2, 3, 4, *range(88, 100)]
