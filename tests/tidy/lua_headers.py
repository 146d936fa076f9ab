"""What the opening comment of a Lua script has to say: purpose, KEYS, ARGV, Returns, Clauses."""

from __future__ import annotations

import re
from pathlib import Path

from tenure.core.errors import UsageError
from tenure.store.redis import load_script, strip_comments

_HEADER = re.compile(
    r"\A\s*(?:--\[\[(?P<block>.*?)\]\]|(?P<lines>(?:[ \t]*--[^\n]*(?:\n|\Z))+))", re.DOTALL
)


def problems(script_path: Path) -> list[str]:
    """What is wrong with a script's file: name, number of keys, includes, header. [] when nothing.

    A file in a folder `include` only needs an opening comment that says what it is for.
    """
    header = _header(script_path.read_text(encoding="utf-8"))
    found = [] if _purpose(header) else ["the header does not open with the script's purpose"]
    if script_path.parent.name == "include":
        return found
    try:
        script = load_script(script_path, script_path.parent / "include")
    except UsageError as error:
        return [*found, str(error)]
    wanted = [f"KEYS[{index}]" for index in range(1, script.keys + 1)]
    wanted += ["ARGV"] if re.search(r"\bARGV\b", strip_comments(script.source)) else []
    wanted += ["Returns", "Clauses"]
    return found + [
        f"the header does not tell {part}" for part in wanted if not _tells(header, part)
    ]


def _header(text: str) -> list[str]:
    match = _HEADER.match(text)
    if match is None:
        return []
    lines = (match["block"] or match["lines"]).splitlines()
    return [line.strip().lstrip("-").strip() for line in lines]


def _purpose(header: list[str]) -> bool:
    first = next((line for line in header if line), "")
    return bool(first) and not any(_tells([first], part) for part in ("KEYS", "ARGV", "Returns"))


def _tells(header: list[str], part: str) -> bool:
    """Whether a line opens with `part` and says something, there or on the line after it.

    Keys are short: several may share a line, each followed by its name.
    """
    if part.startswith("KEYS["):
        return any(re.search(re.escape(part) + r"\s+\w", line) for line in header)
    for index, line in enumerate(header):
        if line.startswith(part):
            rest = line[len(part) :].strip(" :[]0123456789")
            return bool(rest) or any(header[index + 1 : index + 2])
    return False
