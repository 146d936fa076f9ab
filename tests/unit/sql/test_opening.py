"""A store URL that names what nobody knows is refused, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure import open_ledger
from tenure.core.errors import UsageError


@pytest.mark.parametrize("contract", ["inbox", "plane"])
def test_an_option_that_neither_contract_nor_file_has_is_refused(
    contract: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="unknown option 'bogus'"):
        open_ledger(f"{contract}+sqlite:///{tmp_path}/jobs.db?bogus=1")
    assert not (tmp_path / "jobs.db").exists()
