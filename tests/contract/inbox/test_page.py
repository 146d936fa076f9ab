"""The page of the contract agrees with the code."""

from pathlib import Path

import msgspec
import pytest

from tenure.contracts.inbox.options import Options
from tenure.sql.operations import Dialect as Dialect
from tenure.sql.operations import header_columns, load_migrations

ROOT = Path(__file__).resolve().parents[3]
SQL = ROOT / "src" / "tenure" / "sql" / "sql"
PAGE = (ROOT / "docs" / "contracts" / "inbox.md").read_text()


def test_the_page_lists_every_option_with_its_default() -> None:
    section = PAGE.split("\n## Options\n")[1].split("\n## ")[0]
    lines = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    listed = {cells[1].strip(" `"): cells[2].strip() for cells in lines}
    defaults = {
        field.name: f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        for field in msgspec.structs.fields(Options)
    }
    assert listed == defaults


def test_both_engines_have_the_same_operations_with_the_same_parameters() -> None:
    names = {
        dialect: {path.name for path in (SQL / dialect).glob("*.sql")}
        for dialect in ("postgres", "sqlite")
    }
    assert names["postgres"] == names["sqlite"]
    for name in sorted(names["postgres"]):
        texts = [(SQL / dialect / name).read_text() for dialect in ("postgres", "sqlite")]
        for part in ("Batch", "Takes"):
            first, second = (header_columns(text, part) for text in texts)
            assert first == second, f"{name}: {part}"
        for text in texts:
            head = [line for line in text.splitlines() if line.startswith("--")]
            assert any(line.startswith("-- Returns: ") for line in head), name
            clauses = ("-- Clauses: I-", "-- Clauses: P-")
            assert any(line.startswith(clauses) for line in head), name


@pytest.mark.parametrize("dialect", ["postgres", "sqlite"])
def test_the_tables_of_both_engines_have_the_same_columns(dialect: Dialect) -> None:
    def columns(of: Dialect) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for _, _, text in load_migrations("tenure.sql", of):
            for part in text.split("CREATE TABLE ")[1:]:
                table, _, body = part.partition(" (")
                lines = body.split("\n)")[0].splitlines()
                words = [line.split() for line in lines if line.startswith("  ") and line[2] != " "]
                found[table] = {
                    word[0] for word in words if word and word[0].islower() and word[0] != "id"
                }
        return found

    assert columns(dialect) == columns("postgres")
