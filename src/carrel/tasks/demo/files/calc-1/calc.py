"""Works out sums: `value("2 + 3 * (4 - 1)")` is 11."""

import re
import sys

TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])")


def tokens(text: str) -> list[str]:
    found, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"cannot read {text[place:]!r}")
        found.append(match[1])
        place = match.end()
    return found


class Reader:
    def __init__(self, text: str) -> None:
        self.left = tokens(text)

    def next_is(self, *wanted: str) -> bool:
        return bool(self.left) and self.left[0] in wanted

    def take(self) -> str:
        if not self.left:
            raise ValueError("it ends too early")
        return self.left.pop(0)


def total(reader: Reader) -> float:
    result = product(reader)
    if reader.next_is("+", "-"):
        sign = reader.take()
        other = total(reader)
        return result + other if sign == "+" else result - other
    return result


def product(reader: Reader) -> float:
    result = factor(reader)
    while reader.next_is("*", "/"):
        sign = reader.take()
        other = factor(reader)
        result = result * other if sign == "*" else result / other
    return result


def factor(reader: Reader) -> float:
    token = reader.take()
    if token == "-":
        return -factor(reader)
    if token == "(":
        inner = total(reader)
        if reader.take() != ")":
            raise ValueError("a bracket is not closed")
        return inner
    return float(token)


def value(text: str) -> float:
    """What a sum comes to; ValueError where it is none."""
    reader = Reader(text)
    result = total(reader)
    if reader.left:
        raise ValueError(f"{reader.left[0]!r} is too much")
    return result


if __name__ == "__main__":
    print(f"{value(sys.argv[1]):g}")
