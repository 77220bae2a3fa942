"""No word that the vocabulary of this project replaced is in any text file of the repository (`vocabulary.toml`)."""

import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
VOCABULARY = tomllib.loads(Path(__file__).with_name("vocabulary.toml").read_text(encoding="utf-8"))
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
SEARCHED = ("src", "tests", "docs", "examples", "bench", "scripts", ".github", *PAGES, "Makefile")

PROSE = re.compile(rf"\b({'|'.join(VOCABULARY['prose'])})\b", re.IGNORECASE)
NAME_PART = re.compile(
    rf"(^|_)({'|'.join(VOCABULARY['names'])})(_|$)|({'|'.join(map(str.capitalize, VOCABULARY['names']))})(?![a-z])"
)


def searched_files() -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SEARCHED]
    if not (ROOT / ".git").exists():
        listing = ["find", *SEARCHED, "-type", "f", "-not", "-path", "*/__pycache__/*", "-print0"]
    names = (
        subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip("\0").split("\0")
    )
    return [ROOT / name for name in names if not is_exempt(name) and (ROOT / name).is_file()]


def is_exempt(name: str) -> bool:
    return any(name == path or name.startswith(f"{path}/") for path in VOCABULARY["exempt"])


def old_words(name: str, text: str) -> list[str]:
    """`line: word` for every replaced word in a file's name, prose and identifiers."""
    for quoted in VOCABULARY["quoted"]:
        text = text.replace(quoted, "")
    lines = text.replace("_", " ").split("\n")
    found = [f"{number}: {word[0]}" for number, line in enumerate(lines, 1) for word in PROSE.finditer(line)]
    identifiers = [(0, Path(name).stem), *(python_names(text) if name.endswith(".py") else ())]
    # A name with a word of the prose is counted already.
    return found + [
        f"{number}: {word}"
        for number, word in identifiers
        if NAME_PART.search(word) and not (number and PROSE.search(word.replace("_", " ")))
    ]


def python_names(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def test_no_replaced_word_is_used() -> None:
    found = []
    for path in searched_files():
        name = str(path.relative_to(ROOT))
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text
        found += [f"{name}:{word}" for word in old_words(name, text)]
    assert not found, "\n".join(found)


def test_words_are_found_in_prose_names_and_file_names() -> None:
    for word in ("t" + "old", "No" + "body", "wit" + "nesses"):
        assert old_words("a.md", f"It is {word}. Files are t" + "old apart.") == [f"1: {word}"]
    for word in VOCABULARY["names"]:
        title = word.capitalize()
        assert len(old_words("a.py", f"x = was_{word}\n\nclass {title}Once: ...\n")) == 2, word
        assert len(old_words(f"test_{word}.py", f"{word} = '''said'''")) == 2, word
        assert old_words("a.py", f"aside = un{word}ed({word}less, {title}ing)") == [], word
    assert old_words("a.py", "; ".join(map(repr, VOCABULARY["quoted"]))) == []


def test_each_exempt_path_exists() -> None:
    assert [path for path in VOCABULARY["exempt"] if not (ROOT / path).exists()] == []
