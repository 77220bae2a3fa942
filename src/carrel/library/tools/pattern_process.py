"""Run as a program: tries one expression after the other on texts, so that whoever waits can end it when it hangs."""

import json
import re
import sys


def main() -> None:
    """A line `[pattern, text]` in, a line `1` or `0` out."""
    for line in sys.stdin:
        pattern, text = json.loads(line)
        print(int(re.search(pattern, text) is not None), flush=True)


if __name__ == "__main__":
    main()
