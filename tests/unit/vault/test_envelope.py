"""Sealing and opening: what belongs together opens, and nothing else does."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.errors import UsageError
from tenure.vault import (
    Binding,
    CannotOpen,
    LocalRing,
    Sealed,
    Secret,
    UnknownKek,
    Vault,
    VaultError,
    new_kek,
    read_ring,
)

BOUND = Binding("job-1", "acme", 3)
PLAIN = Secret(b'{"secret_access_key": "canary-0451"}')


def ring(*ids: str) -> LocalRing:
    return read_ring("\n".join(new_kek(kek_id) for kek_id in ids))


@pytest.mark.clause("I-50")
async def test_what_was_sealed_opens_again() -> None:
    vault = Vault(ring("k1"))
    sealed = await vault.seal(PLAIN, BOUND)
    assert (await vault.open(sealed, BOUND)) == PLAIN
    assert sealed.kek_id == "k1"
    assert b"canary" not in sealed.encrypted + sealed.dek_wrapped


@pytest.mark.clause("I-50")
@pytest.mark.parametrize(
    "other",
    [Binding("job-2", "acme", 3), Binding("job-1", "evil", 3), Binding("job-1", "acme", 4)],
)
async def test_a_blob_opens_for_no_other_job_requester_or_version(other: Binding) -> None:
    vault = Vault(ring("k1"))
    with pytest.raises(CannotOpen):
        await vault.open(await vault.seal(PLAIN, BOUND), other)


@pytest.mark.clause("I-50")
@given(
    st.tuples(st.text(), st.text(), st.integers(0, 99)),
    st.tuples(st.text(), st.text(), st.integers(0, 99)),
)
def test_two_bindings_never_read_alike(
    one: tuple[str, str, int], two: tuple[str, str, int]
) -> None:
    alike = Binding(*one).associated_data(b"p") == Binding(*two).associated_data(b"p")
    assert alike is (one == two)


@pytest.mark.clause("I-50")
def test_parts_that_a_separator_would_confuse_stay_apart() -> None:
    one, two = Binding("job|1", "req", 1), Binding("job", "1|req", 1)
    assert one.associated_data(b"p") != two.associated_data(b"p")


@pytest.mark.clause("I-50")
@given(st.data())
async def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    vault = Vault(ring("k1"))
    sealed = await vault.seal(PLAIN, BOUND)
    part = data.draw(st.sampled_from(["encrypted", "dek_wrapped"]))
    raw = bytearray(getattr(sealed, part))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    changed = replace(sealed, **{part: bytes(raw)})
    with pytest.raises(CannotOpen):
        await vault.open(changed, BOUND)


@pytest.mark.clause("I-50")
@pytest.mark.parametrize("cut", [0, 5, 12, 20])
async def test_a_blob_that_was_cut_short_does_not_open(cut: int) -> None:
    vault = Vault(ring("k1"))
    sealed = await vault.seal(PLAIN, BOUND)
    for part in ("encrypted", "dek_wrapped"):
        with pytest.raises(CannotOpen):
            await vault.open(replace(sealed, **{part: getattr(sealed, part)[:cut]}), BOUND)


@pytest.mark.clause("I-50")
async def test_no_data_key_and_no_nonce_serves_twice() -> None:
    vault = Vault(ring("k1"))
    made = [await vault.seal(PLAIN, BOUND) for _ in range(500)]
    assert len({sealed.encrypted[:12] for sealed in made}) == 500
    assert len({sealed.encrypted[12:] for sealed in made}) == 500
    assert len({sealed.dek_wrapped for sealed in made}) == 500


@pytest.mark.clause("I-51")
async def test_a_rewrap_keeps_the_ciphertext_and_opens_under_the_new_key_alone() -> None:
    old, new = new_kek("old"), new_kek("new")
    sealed = await Vault(read_ring(old)).seal(PLAIN, BOUND)
    moved = await Vault(read_ring(f"{new}\n{old}")).rewrap(sealed, BOUND)
    assert moved.encrypted == sealed.encrypted
    assert (moved.kek_id, moved.dek_wrapped == sealed.dek_wrapped) == ("new", False)
    assert await Vault(read_ring(new)).open(moved, BOUND) == PLAIN
    with pytest.raises(UnknownKek, match="no key 'new'"):
        await Vault(read_ring(old)).open(moved, BOUND)


@pytest.mark.clause("I-50")
async def test_a_wrapping_that_claims_another_key_does_not_open() -> None:
    same = base64.b64encode(b"k" * 32).decode()
    vault = Vault(read_ring(f"a={same},b={same}"))
    sealed = await vault.seal(PLAIN, BOUND)
    with pytest.raises(CannotOpen):
        await vault.open(replace(sealed, kek_id="b"), BOUND)


@pytest.mark.clause("I-50")
async def test_a_format_from_the_future_is_refused_in_words() -> None:
    vault = Vault(ring("k1"))
    with pytest.raises(VaultError, match="format 2"):
        await vault.open(Sealed(b"", b"", "k1", 2), BOUND)


@pytest.mark.clause("I-50")
def test_a_ring_is_read_from_lines_with_comments_and_the_first_key_is_active() -> None:
    text = f"# keys of the vault\n{new_kek('2026-11')}  # now\n\n{new_kek('2026-05')}\n"
    assert read_ring(text).active_id == "2026-11"


@pytest.mark.clause("I-50")
@pytest.mark.parametrize(
    "text",
    ["", "k1", "k1=canary!", "k1=Y2FuYXJ5", f"{new_kek('a')}\n{new_kek('a')}"],
    ids=["empty", "no key", "no base64", "too short", "twice"],
)
def test_a_bad_ring_is_refused_without_showing_its_keys(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_ring(text)
    said = str(caught.value)
    assert "canary" not in said
    assert "Y2FuYXJ5" not in said
