"""The prose of the documentation: plain words, and sentences that can be read at once.

The words below are those that made earlier texts hard to read. Each has what to write instead.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.reading import ROOT, files, listed, shown, text
from tests.tidy.test_docs import prose
from tests.tidy.test_public_names import NAMES

WORDS_MAX = 40
# Their texts are made by a command, or belong to another document.
GENERATED = {"docs/reference/rights.md", "docs/contracts/features.md"}
# What each stands for is said in plain words instead.
TICS = {
    r"whoever|whomever": "the party itself: a worker, a client, you",
    r"nobody|somebody|everybody|anybody": "the party itself, or 'no worker', 'every user'",
    r"(is|are|was|were|be|been) told": "'gets an error', 'is notified', 'reports'",
    r"stands? (in|for itself|behind|there|on)|stood": "'is in', 'means'",
    r"lies (in|at|behind|beside|on)|lie in": "'is in', 'is at'",
    r"worth nothing": "say what to do with it",
    r"newest words|own words for it": "'last message'",
    r"rested|ticked": "'paused', 'selected'",
    r"mends?|mended|mending": "'fix', 'repair'",
    r"shall": "'must', 'will'",
    r"for ever": "'forever'",
    r"any ?more than|no more than that": "say it directly",
    r"dear": "'costly'",
    r"ours|theirs": "the name: 'Tenure', 'added', 'BullMQ'",
    r"makes? no sound|without a word": "'silently'",
    r"hear of|hears of": "'learn'",
    r"lent|loan": "'leased'",
    r"rings? (no|a|the) bell": "'sends a wake-up'",
    r"the way back": "'to go back'",
    r"by its own (text|word)": "say which text",
    r"cage[ds]?": "'sandbox'",
}
# Sentences of earlier versions. They must not come back.
WORST = (
    "work is never owned, only leased",
    "a job that nobody can prove to hold is given to somebody else",
    "of a lake that is gone `--reader NAME` releases the name",
    "its message is worth nothing any more",
    "So nobody has to notice that a worker died",
    "A job is never given to a worker, only lent",
    "It need not know who does it",
    "the newest words",
    "stays away",
    "done a second",
    "Nobody did anything yet",
    "Facts",
    "Ttl s",
    "with its own words",
    "what it promises",
    "what it said",
)
TIC = re.compile(
    "|".join(rf"(?P<t{at}>\b(?:{words})\b)" for at, words in enumerate(TICS)), re.IGNORECASE
)
# Pages that are rewritten elsewhere at the moment; each leaves the list with its new text.
LATER = {"docs/howto/pipeline.md"}


def pages() -> list[Path]:
    found = [
        *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")),
        *files(ROOT / "docs", "*.md"),
    ]
    return [path for path in found if shown(path) not in GENERATED | LATER]


PAGES = pages()


def wrong_words(line: str) -> Iterator[str]:
    """Why a text is refused: each word of the list that it has."""
    for match in TIC.finditer(line):
        instead = list(TICS.values())[int(str(match.lastgroup)[1:])]
        yield f"{match[0]!r}: write {instead}"


def sentences(page: Path) -> Iterator[tuple[int, str]]:
    """The sentences of a page with the line on which their block begins; a cell is a block."""
    block: list[str] = []
    first = 0
    for number, line in [*outside_fences(page), (0, "")]:
        starts = re.match(r"\s*([-*#>|]|\d+\.|$|<)", line)
        if starts and block:
            yield from ((first, each) for each in split(" ".join(block)))
            block = []
        if line.startswith("|"):
            yield from ((number, each) for cell in line.split("|") for each in split(cell))
        elif line.strip():
            first = first if block else number
            block.append(line.strip())


def outside_fences(page: Path) -> list[tuple[int, str]]:
    """The lines of a page; a code span counts as one word."""
    return prose(page)


def split(block: str) -> list[str]:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block)
    return re.split(r"(?<=[.!?:;])\s+", plain)


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_a_page_uses_plain_words(page: Path) -> None:
    problems = [
        f"{shown(page, number)}: {why}" for number, line in prose(page) for why in wrong_words(line)
    ]
    assert not problems, listed(problems)


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_no_sentence_of_a_page_is_longer_than_forty_words(page: Path) -> None:
    problems = [
        f"{shown(page, number)}: {len(sentence.split())} words: {sentence[:80]}"
        for number, sentence in sentences(page)
        if len(sentence.split()) > WORDS_MAX
    ]
    assert not problems, listed(problems)


@pytest.mark.parametrize("sentence", WORST)
def test_an_old_sentence_that_readers_stumbled_over_is_gone(sentence: str) -> None:
    found = [shown(page) for page in PAGES if sentence in " ".join(text(page).split())]
    assert not found, listed(found)


def test_public_docstrings_use_plain_words_too() -> None:
    problems = []
    for module, name in NAMES:
        thing = getattr(importlib.import_module(module), name)
        members = vars(thing).items() if inspect.isclass(thing) else []
        public = [
            (name, thing),
            *((f"{name}.{key}", each) for key, each in members if key[0] != "_"),
        ]
        for shown_name, each in public:
            if inspect.isclass(each) or inspect.isroutine(each):
                problems += [
                    f"{module}.{shown_name}: {why}" for why in wrong_words(each.__doc__ or "")
                ]
    assert not problems, listed(problems)


def test_the_linter_finds_a_tic_and_a_long_sentence(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n" + "word " * (WORDS_MAX + 1) + "end.\n\n- Whoever asks.\n\n```text\nnobody\n```\n"
    )
    found = [why for _, line in prose(page) for why in wrong_words(line)]
    assert len(found) == 1
    lengths = [len(sentence.split()) for _, sentence in sentences(page)]
    assert max(lengths) == WORDS_MAX + 2
