"""Spans of time, as pairs of a beginning and an end (in minutes); the end is not part of the span."""

Span = tuple[int, int]


def merged(spans: list[Span]) -> list[Span]:
    """The same times with as few spans as can be, in order."""
    result: list[Span] = []
    for begin, end in spans:
        if result and begin < result[-1][1]:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result


def free(taken: list[Span], day: Span) -> list[Span]:
    """What is left of a day."""
    result, now = [], day[0]
    for begin, end in merged(taken):
        if begin > now:
            result.append((now, begin))
        now = end
    if now < day[1]:
        result.append((now, day[1]))
    return result
