"""Numbers that no store holds, and JSON that no reader takes: exit code 2, in clear words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.cli.conftest import Cli, Start

HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "words",
    [
        ["submit", "t", "-d", "1e400"], ["submit", "t", "-d", HUGE], ["submit", "t", "-d", "@deep"],
        ["submit", "t", "--delay", "1e400"], ["submit", "t", "--delay", HUGE],
        ["submit", "t", "--delay", "nan"], ["submit", "t", "--max-attempts", HUGE],
        ["submit", "t", "--timeout", "inf"], ["ls", "--limit", HUGE], ["ls", "--after", "9" * 30],
        ["keys", "create", "--days", "1e400"], ["keys", "create", "--days", "1e300"],
        ["keys", "create", "--rate", "1e400"], ["keys", "create", "--depth", HUGE],
        ["top", "--once", "--interval", "1e400"], ["watch", "x", "--timeout", "1e400"],
    ],
)  # fmt: skip
def test_a_number_or_a_payload_that_nothing_holds_is_a_usage_error(
    cli: Cli, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "deep").write_text("[" * 100_000 + "]" * 100_000)
    said = cli(*words)
    assert said.code == 2, said
    assert "Error:" not in said.err, said.err


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize(
    "option",
    [f"lease_ms={HUGE}", "lease_ms=1e400", "journal_days=nan", "journal_days=1e400",
     "keep_ms=99999999999999999999", "idempotency_ttl_s=99999999999999999999"],
)  # fmt: skip
def test_an_option_of_a_queue_that_no_store_holds_is_a_usage_error(
    cli: Cli, tmp_path: Path, contract: str, option: str
) -> None:
    url = f"{contract}+sqlite:///{tmp_path}/jobs.db?{option}"
    said = cli("submit", "t", "-q", url)
    assert said.code == 2, said
    assert "Error:" not in said.err, said.err


def test_days_beyond_any_clock_keep_history_for_as_long_as_there_is(
    cli: Cli, tmp_path: Path
) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db?journal_days=1000000000000"
    assert cli("submit", "t", "-q", url).code == 0


@pytest.mark.parametrize("value", ["1e400", "nan", HUGE])
def test_a_setting_that_is_no_number_of_any_clock_is_a_usage_error(
    start: Start, value: str
) -> None:
    program = start("gateway", "--port", "1", TENURE_GATEWAY_HEARTBEAT_S=value)
    assert program.ended() == 2
    assert "gateway.heartbeat_s" in program.words
