"""The page of the contract agrees with the code."""

from pathlib import Path

import msgspec
import pytest

from tenure.contracts.inbox.queue import Options
from tenure.sql.operations import Dialect, header_columns, statement_texts
from tenure.sql.schema import load_migrations

ROOT = Path(__file__).resolve().parents[3]
ENGINE_ONLY = {"copy_begin", "peek", "temp_tables", "repair_counters"}
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
    postgres, sqlite = statement_texts("postgres"), statement_texts("sqlite")
    assert postgres.keys() - ENGINE_ONLY == sqlite.keys() - ENGINE_ONLY
    for name in sorted(postgres.keys() - ENGINE_ONLY):
        texts = [postgres[name], sqlite[name]]
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
        for _, _, text in load_migrations(of):
            for part in text.split("CREATE TABLE ")[1:]:
                table, _, body = part.partition(" (")
                lines = body.split("\n)")[0].splitlines()
                words = [line.split() for line in lines if line.startswith("  ") and line[2] != " "]
                found[table] = {
                    word[0] for word in words if word and word[0].islower() and word[0] != "id"
                }
        return found

    assert columns(dialect) == columns("postgres")
