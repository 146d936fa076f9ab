"""Queue URLs: taken apart, checked, and never showing a password."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tenure.core.errors import UnknownContract, UsageError
from tenure.core.registry import (
    contract_names,
    contracts,
    open_journal,
    open_ledger,
    open_queue,
    parse_url,
)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    lease_ms: int = 15_000
    namespace: str = ""
    fast: bool = False


@pytest.mark.parametrize(
    ("text", "contract", "store"),
    [
        ("streams+redis://host:6379/0", "streams", "redis://host:6379/0"),
        ("streams+rediss://u:p@host/0", "streams", "rediss://u:p@host/0"),
        ("streams+unix:///run/redis.sock", "streams", "unix:///run/redis.sock"),
        ("streams+redis+unix:///run/redis.sock", "streams", "redis+unix:///run/redis.sock"),
        ("inbox+sqlite:///jobs.db", "inbox", "sqlite:///jobs.db"),
        ("plane+http://host:8470", "plane", "http://host:8470"),
        ("memory://", "memory", ""),
        ("memory://demo", "memory", ""),
    ],
)
def test_a_url_names_its_contract_and_its_store(text: str, contract: str, store: str) -> None:
    url = parse_url(text)
    assert (url.contract, url.store, url.options) == (contract, store, {})


@pytest.mark.parametrize("text", ["", "redis", "localhost:6379", "://x", "streams:/x"])
def test_what_is_no_url_is_answered_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"streams\+redis://localhost:6379/0"):
        parse_url(text)


def test_options_are_typed_and_the_rest_stays_with_the_store() -> None:
    url = parse_url("streams+redis://h/0?lease_ms=500&fast=true&db=3&timeout=2")
    options, store = url.read(Options)
    assert options == Options(lease_ms=500, fast=True)
    assert store == "redis://h/0?db=3&timeout=2"


def test_an_option_with_a_wrong_value_is_named() -> None:
    with pytest.raises(UsageError, match="lease_ms") as raised:
        parse_url("streams+redis://h/0?lease_ms=soon").read(Options)
    assert raised.value.contract == "streams"


def test_an_option_that_must_be_there_is_asked_for() -> None:
    class Needs(msgspec.Struct, frozen=True):
        queue: str

    with pytest.raises(UsageError, match=r"does not say the queue; add \?queue=NAME"):
        parse_url("omniq+redis://h/0").read(Needs)


def test_a_misspelt_option_is_answered_with_the_right_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'lease_ms'"):
        parse_url("streams+redis://h/0?leas_ms=500").read(Options)


@pytest.mark.parametrize(
    "text",
    [
        "streams+redis://user:s3cr3t@host/0",
        "streams+redis://:s3cr3t@host/0?lease_ms=x",
    ],
)
def test_a_password_is_shown_nowhere(text: str) -> None:
    url = parse_url(text)
    assert "s3cr3t" not in url.safe
    assert "s3cr3t" not in repr(url)
    assert "***@host" in url.safe
    wrong = msgspec.structs.replace(url, options={"lease_ms": "x"})
    with pytest.raises(UsageError) as raised:
        wrong.read(Options)
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize("host", ["[[[", "ho\u2100st"])
def test_a_url_that_cannot_be_read_is_refused_without_its_password(host: str) -> None:
    with pytest.raises(UsageError, match="percent-encoded") as raised:
        parse_url(f"streams+redis://user:s3cr3t@{host}/0")
    assert "s3cr3t" not in str(raised.value)


def test_an_unknown_contract_is_refused_without_its_password() -> None:
    with pytest.raises(UnknownContract) as raised:
        open_queue("nosuch+redis://:s3cr3t@host/0")
    assert "s3cr3t" not in str(raised.value)


def test_a_url_without_a_password_is_shown_as_it_is() -> None:
    text = "streams+redis://user@host/0?lease_ms=1"
    assert parse_url(text).safe == text


def test_an_unknown_contract_is_answered_with_those_there_are() -> None:
    with pytest.raises(UnknownContract, match="did you mean 'memory'") as raised:
        open_queue("memroy://x")
    assert all(name in str(raised.value) for name in contract_names())


@pytest.mark.parametrize("text", ["os.path://x", "..://x", "__main__://x", "sys+redis://x"])
def test_a_url_cannot_import_what_is_no_contract(text: str) -> None:
    with pytest.raises(UsageError):
        open_queue(text)


def test_every_folder_is_a_contract() -> None:
    names = contract_names()
    assert names == sorted(names)
    assert {"memory", "streams"} <= set(names)


def test_all_three_sides_of_a_queue_open_by_one_url() -> None:
    url = "memory://opening-test"
    assert open_queue(url, worker_id="w")
    assert open_ledger(url)
    assert open_journal(url)


def test_a_contract_may_live_in_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found by its entry point once its distribution is installed."""
    (tmp_path / "foreign_contract.py").write_text(
        "from tenure.core.registry import Contract\n"
        "from tenure.core.state import Machine\n"
        "CONTRACT = Contract(\n"
        "    machine=Machine(contract='foreign', initial=(), running=(), final=(), steps={}),\n"
        "    open_queue=lambda url, worker_id: (url.store, worker_id),\n"
        "    open_ledger=None, open_journal=None, read_options=None, example_url='foreign+x://h',\n"
        ")\n"
    )
    info = tmp_path / "foreign_contract-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-contract\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tenure.contracts]\nforeign = foreign_contract:CONTRACT\n"
    )
    assert "foreign" not in contract_names()
    monkeypatch.syspath_prepend(tmp_path)
    assert "foreign" in contract_names()
    opened: object = open_queue("foreign+x://host", worker_id="w1")
    assert opened == ("x://host", "w1")


def test_the_descriptors_of_all_contracts_load_no_store_and_no_web_server() -> None:
    code = (
        "import sys; from tenure.core.registry import contracts; print(len(contracts()));"
        "heavy = {'hiredis', 'asyncpg', 'sqlite3', 'cryptography', 'starlette', 'structlog'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(len(contract_names())), "[]"]


def test_a_state_has_the_same_kind_in_every_contract_that_has_it() -> None:
    kinds: dict[str, set[str]] = {}
    for contract in contracts().values():
        for state in contract.machine.states:
            kinds.setdefault(state.lower(), set()).add(contract.machine.kind(state))
    assert {state: found for state, found in kinds.items() if len(found) > 1} == {}


def test_passwords_among_the_options_are_not_shown() -> None:
    url = parse_url(
        "plane+postgresql://u@h/db?password=s3cr3t&sslpassword=s3cr3t"
        "&redis=redis://u:s3cr3t@h:6379/0&lease_ms=5"
    )
    assert "s3cr3t" not in url.safe
    assert "@h:6379/0&lease_ms=5" in url.safe


@pytest.mark.parametrize(
    "text",
    [
        "plane+postgresql://u@h/db?redis=redis%3A%2F%2F%3As3cr3t%40r%3A6379",
        "plane+postgresql://u@h/db?redis=redis%3A%2F%2Fr%3Fpassword%3Ds3cr3t",
        "plane+postgresql://u@h/db?redis=redis://u:a@s3cr3t@r:6379",
        "inbox+postgresql://h/db?user=u&password=a@s3cr3t",
        "inbox+postgresql://h/db?pass%77ord=s3cr3t",
        "inbox+postgresql://u:a@s3cr3t@h/db",
        "streams+redis://u:a/s3cr3t@h/0",
        "streams+redis://:s3cr3t@h",
    ],
)
def test_a_password_is_masked_however_it_is_written(text: str) -> None:
    assert "s3cr3t" not in parse_url(text).safe
    assert "***" in parse_url(text).safe


def test_an_option_that_is_a_url_without_a_password_is_shown_as_it_is() -> None:
    text = "plane+postgresql://u@h/db?redis=redis%3A%2F%2Fr%3A6379&to=a@b"
    assert parse_url(text).safe == text
