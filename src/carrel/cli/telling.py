"""The voice of the tour: a numbered heading for each step, and what came of it set in below."""

from carrel.cli import show


class Teller:
    """Counts the steps."""

    def __init__(self) -> None:
        self._step = 0

    def begin(self, title: str) -> None:
        self._step += 1
        show.say()
        show.say(f"{self._step}  {title}", "bold cyan")

    def tell(self, text: str, style: str = "") -> None:
        show.print_indented(show.words(text, style), 3)
