"""The voice of the tour: a numbered heading for each step, and what came of it set in below."""

from carrel.cli.output import print_indented, print_text, safe_text


class Teller:
    """Counts the steps."""

    def __init__(self) -> None:
        self._step = 0

    def begin(self, title: str) -> None:
        self._step += 1
        print_text()
        print_text(f"{self._step}  {title}", "bold cyan")

    def tell(self, text: str, style: str = "") -> None:
        print_indented(safe_text(text, style), 3)
