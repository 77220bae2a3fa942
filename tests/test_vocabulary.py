"""The words that DESIGN.md replaced are gone from the code and the docs: counted in every text file of the repository.

`python tests/test_vocabulary.py` prints the files that still have some, as in `vocabulary_remaining.txt`.
"""

import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
REMAINING = Path(__file__).with_name("vocabulary_remaining.txt")
SEARCHED = ("src", "tests", "docs", "examples", "bench", "scripts", "README.md", "CONTRIBUTING.md", "Makefile")

PROSE = re.compile(r"\b(told(?! apart)|whoever|nobody|somebody|seams?|witness(es)?)\b", re.IGNORECASE)
IDENTIFIER = re.compile(
    r"(^|_)(told|said|asked|whose|whoever|nobody|somebody|seam|witness)(_|$)"
    r"|(Told|Said|Asked|Whose|Whoever|Nobody|Somebody|Seam|Witness)(?![a-z])"
)

EXEMPT = {
    "tests/test_vocabulary.py": "names the words",
    "tests/vocabulary_remaining.txt": "names files",
    "scripts/seed-violations": "plants one of the words",
    "bench/data": "definitions of real tools, as their authors wrote them",
    "src/carrel/embedding/words": "a vocabulary of English",
    "src/carrel/tasks/demo/files": "source files of the demo's samples",
    "tests/conversation/earlier_versions": "logs that earlier versions wrote",
    "tests/formats/golden": "recorded answers of model providers",
    "tests/importers/samples": "logs of other programs",
    "tests/tasks/recorded": "recorded reports of other test runners",
}
"""Path or folder, and why its words are not ours."""


def searched_files() -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SEARCHED]
    if not (ROOT / ".git").exists():
        listing = ["find", *SEARCHED, "-type", "f", "-not", "-path", "*/__pycache__/*", "-print0"]
    names = (
        subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip("\0").split("\0")
    )
    return [ROOT / name for name in names if not is_exempt(name) and (ROOT / name).is_file()]


def is_exempt(name: str) -> bool:
    return any(name == path or name.startswith(f"{path}/") for path in EXEMPT)


def old_words(name: str, text: str) -> list[str]:
    """`line: word` for every word of the old vocabulary in a file's name, prose and identifiers."""
    lines = text.replace("_", " ").split("\n")
    found = [f"{number}: {word[0]}" for number, line in enumerate(lines, 1) for word in PROSE.finditer(line)]
    identifiers = [(0, Path(name).stem), *(python_names(text) if name.endswith(".py") else ())]
    # A name such as `was_told` is counted already, by its words.
    return found + [
        f"{number}: {word}"
        for number, word in identifiers
        if IDENTIFIER.search(word) and not (number and PROSE.search(word.replace("_", " ")))
    ]


def top_folder(name: str) -> str:
    return name.partition("/")[0]


def python_names(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def found_words() -> dict[str, list[str]]:
    found = {}
    for path in searched_files():
        name = str(path.relative_to(ROOT))
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text
        if words := old_words(name, text):
            found[name] = words
    return found


def remaining() -> dict[str, int]:
    """The files that are not clean yet, with the number of words each may still have."""
    lines = REMAINING.read_text(encoding="utf-8").splitlines() if REMAINING.exists() else []
    return {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines)}


def test_the_words_that_were_replaced_do_not_come_back() -> None:
    allowed, found = remaining(), found_words()
    new = {name: words for name, words in found.items() if len(words) > allowed.get(name, 0)}
    # A file that was renamed or split takes its allowance along, within src or tests.
    excess = Counter({top_folder(name): 0 for name in new})
    for name, words in new.items():
        excess[top_folder(name)] += len(words) - allowed.get(name, 0)
    for name, count in allowed.items():
        if not (ROOT / name).exists():
            excess[top_folder(name)] -= count
    assert not +excess, "\n".join(f"{name}:{word}" for name, words in new.items() for word in words)


def test_words_are_found_in_prose_names_and_file_names() -> None:
    assert old_words("a.md", "Nobody is told. Files are told apart.") == ["1: Nobody", "1: told"]
    assert old_words("a.py", "x = was_told\n\nclass SaidOnce: ...\n") == ["1: told", "3: SaidOnce"]
    assert old_words("test_asked.py", "asked = '''asked'''") == ["0: test_asked", "1: asked"]
    assert old_words("a.py", "aside = unwitnessed(seamless, Witnessing)") == []


def test_each_exempt_path_exists() -> None:
    assert [path for path in EXEMPT if not (ROOT / path).exists() and path != "tests/vocabulary_remaining.txt"] == []


if __name__ == "__main__":
    print("\n".join(f"{len(words):4} {name}" for name, words in sorted(found_words().items())))
