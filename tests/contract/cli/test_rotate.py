"""`tenure keys new-kek` and `rotate` on a real store of sealed credentials."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tenure.cli.console import run
from tenure.core import registry
from tenure.vault import Binding, Secret, Vault, new_kek, read_ring
from tests.contract.vault.rows import Rows

OLD, NEW = new_kek("old"), new_kek("new")
CANARY = "canary-credential"

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with 50 credentials under the old key, reachable as `sealed://x`."""
    path = tmp_path / "creds.db"

    async def fill() -> None:
        rows, vault = Rows(path), Vault(read_ring(OLD))
        for number in range(50):
            bound = Binding(f"job-{number:02}", "acme", 1)
            rows.put(bound, await vault.seal(Secret(CANARY), bound))
        await rows.close()

    asyncio.run(fill())
    known = registry.contract_of
    contract = SimpleNamespace(parts={"credentials": lambda url: Rows(path)})

    def found(url: str | registry.QueueUrl) -> object:
        parsed = registry.parse_url(url) if isinstance(url, str) else url
        return contract if parsed.contract == "sealed" else known(parsed)

    monkeypatch.setattr(registry, "contract_of", found)
    return path


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.chdir(tmp_path)

    def spoken(*words: str, ring: str = "") -> tuple[int, str, str]:
        file = tmp_path / "ring"
        file.write_text(ring)
        monkeypatch.setenv("TENURE_VAULT_KEYS_FILE", str(file))
        code = run(list(words))
        said = capsys.readouterr()
        return code, said.out, said.err

    return spoken


def test_a_rotation_tells_what_it_moved_and_which_keys_may_go(sealed: Path, say: Say) -> None:
    code, out, err = say("keys", "rotate", "-q", "sealed://x", ring=f"{NEW}\n{OLD}")
    assert (code, out) == (0, "50 rewrapped under new\n")
    assert "older ones may leave the ring" in err
    code, out, _ = say("keys", "rotate", "-q", "sealed://x", "--json", ring=NEW)
    assert json.loads(out) == {
        "active": "new",
        "rewrapped": 0,
        "left": {"new": 50},
        "unopened": [],
    }


def test_a_ring_that_lacks_the_old_key_is_told_and_changes_nothing(sealed: Path, say: Say) -> None:
    code, out, err = say("keys", "rotate", "-q", "sealed://x", ring=NEW)
    assert (code, out) == (8, "0 rewrapped under new\n")
    assert "50 rows are still under old: keep that key" in err
    assert "job job-00: its key does not open" in err


def test_a_new_key_is_printed_as_a_line_of_the_ring(say: Say) -> None:
    code, out, _ = say("keys", "new-kek", "kek-7")
    assert code == 0
    assert read_ring(out).active_id == "kek-7"
    _, today, _ = say("keys", "new-kek")
    assert read_ring(today).active_id.startswith("kek-2")
    assert say("keys", "new-kek", "a b")[0] == 2


def test_without_a_ring_or_with_a_queue_that_seals_nothing_it_is_said_what_is_missing(
    sealed: Path, say: Say
) -> None:
    code, _, err = say("keys", "rotate", "-q", "sealed://x", ring="")
    assert (code, "there is no key ring" in err) == (2, True)
    code, _, err = say("keys", "rotate", "-q", "memory://x", ring=NEW)
    assert code == 2
    assert "the contract 'memory' keeps no credentials" in err


def test_a_ring_of_the_operators_own_takes_the_place_of_ours(
    sealed: Path, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a KMS would: the vault asks it to wrap and unwrap, and never for a key."""
    (tmp_path / "our_kms.py").write_text(
        "from tenure.vault import read_ring\n"
        f"def ring():\n    return read_ring({NEW + ',' + OLD!r})\n"
        "def nothing():\n    return object()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TENURE_VAULT_KMS", "our_kms:ring")
    assert say("keys", "rotate", "-q", "sealed://x")[1] == "50 rewrapped under new\n"
    for hook, why in (("our_kms:nothing", "it lacks active_id"), ("no_such:x", "cannot be used")):
        monkeypatch.setenv("TENURE_VAULT_KMS", hook)
        code, _, err = say("keys", "rotate", "-q", "sealed://x")
        assert code == 2
        assert why in err


def test_no_key_and_no_credential_is_ever_shown(sealed: Path, say: Say) -> None:
    said = ""
    broken = f"{NEW}\n{OLD[:-6]}"
    for ring in (f"{NEW}\n{OLD}", NEW, broken, OLD):
        for more in ((), ("--json",)):
            _, out, err = say("keys", "rotate", "-q", "sealed://x", *more, ring=ring)
            said += out + err
    for secret in (CANARY, OLD.partition("=")[2], NEW.partition("=")[2], OLD[-20:-6]):
        assert secret not in said
