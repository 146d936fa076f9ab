"""The catalogue of log events: every event that the source logs is on the page, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.reading import PACKAGE, ROOT, coded_row, files, shown, text, tree

PAGE = ROOT / "docs" / "reference" / "logs.md"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
HELPERS = {"_warn", "warn"}  # functions that log their first argument
ELSEWHERE = {"tasks", "samples.py"}  # what handlers and samples log is their own


def texts(node: ast.expr, module: ast.Module) -> Iterator[str]:
    """The texts that an expression can be: a name by what is assigned to it, a table by values."""
    match node:
        case ast.Constant(value=str(value)):
            yield value
        case ast.IfExp():
            yield from texts(node.body, module)
            yield from texts(node.orelse, module)
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
            for each in ast.walk(module):
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name:
                    yield from texts(each.value, module)
        case ast.Dict(values=values):
            for each_value in values:
                yield from texts(each_value, module)


def is_logging(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=name):
            return name in HELPERS
        case ast.Attribute(value=base, attr=attr):
            return attr in LEVELS and "log" in ast.unparse(base).lower()
    return False


def logged() -> dict[str, str]:
    """Each event with a place that logs it."""
    found = {}
    for path in files(PACKAGE, "*.py"):
        if ELSEWHERE & {path.name, *(parent.name for parent in path.parents)}:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and node.args and is_logging(node):
                for event in texts(node.args[0], tree(path)):
                    found[event] = shown(path, node.lineno)
    return found


def failures() -> set[str]:
    """The two events of a failed attempt, which go to Python's logging as well."""
    source = text(PACKAGE / "worker" / "telemetry.py")
    match = re.search(r'event = "([^"]+)" if retried else "([^"]+)"', source)
    assert match is not None
    return {match[1], match[2]}


def test_every_log_event_of_the_source_is_on_the_page_and_no_other() -> None:
    listed = {code for line in text(PAGE).splitlines() if (code := coded_row(line))}
    found = logged()
    assert len(found) > 50
    lacking = {event: place for event, place in found.items() if event not in listed}
    assert lacking == {}, f"add them to {shown(PAGE)}"
    assert listed - found.keys() - failures() == set(), "these are logged no more"


def test_an_event_behind_a_table_or_a_choice_is_found(tmp_path: Path) -> None:
    module = ast.parse(
        'T = {"a": "one"}\nlog.info(T[a])\nw = "two" if x else "three"\nlog.error(w)'
    )
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    assert all(map(is_logging, calls))
    assert [set(texts(call.args[0], module)) for call in calls] == [{"one"}, {"two", "three"}]
