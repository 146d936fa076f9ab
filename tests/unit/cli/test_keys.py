"""The vault's keys as settings give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure.cli.config import Config
from tenure.cli.keys import open_ring, open_seal
from tenure.core.errors import UsageError
from tenure.vault import Binding, Sealed, Vault, new_kek


def test_a_ring_is_read_from_the_environment_or_a_file(tmp_path: Path) -> None:
    line = new_kek("k9")
    (tmp_path / "ring").write_text(line)
    for environment in (
        {"TENURE_VAULT_KEYS": line},
        {"TENURE_VAULT_KEYS_FILE": str(tmp_path / "ring")},
    ):
        assert open_ring(Config(environment, tmp_path)).active_id == "k9"
    with pytest.raises(UsageError, match="there is no key ring"):
        open_ring(Config({}, tmp_path))


async def test_a_gateway_seals_into_the_four_columns_what_a_worker_opens(tmp_path: Path) -> None:
    config = Config({"TENURE_VAULT_KEYS": new_kek("k9")}, tmp_path)
    seal = open_seal(config)
    assert seal is not None
    columns = await seal(b'{"a": 1}', "j1", "acme", 1)
    assert list(columns) == [
        "storage_creds_encrypted",
        "storage_creds_dek_wrapped",
        "storage_creds_kek_id",
        "storage_creds_encryption_version",
    ]
    opened = await Vault(open_ring(config)).open(
        Sealed(*columns.values()), Binding("j1", "acme", 1)
    )
    assert opened.text() == '{"a": 1}'


def test_a_gateway_without_a_ring_seals_nothing(tmp_path: Path) -> None:
    assert open_seal(Config({}, tmp_path)) is None
