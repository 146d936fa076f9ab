"""When two requests are the same request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.encoding import short_hash
from tenure.core.errors import UsageError
from tenure.core.job import (
    KEY_CHARS_MAX,
    canonical,
    check_key,
    request_hash,
    scoped_key,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@given(value=st.dictionaries(st.text(max_size=8), json_values, max_size=6))
def test_the_order_of_keys_does_not_matter(value: dict[str, object]) -> None:
    assert canonical(dict(reversed(value.items()))) == canonical(value)
    assert request_hash(dict(reversed(value.items()))) == request_hash(value)


@given(one=json_values, two=json_values)
def test_different_requests_have_different_hashes(one: object, two: object) -> None:
    same = canonical(one) == canonical(two)
    assert (request_hash(one) == request_hash(two)) == same


def test_parts_are_not_run_together() -> None:
    assert request_hash("ab", "c") != request_hash("a", "bc")
    assert request_hash("a") != request_hash("a", None)


@given(mine=names, other=names, one=names, two=names)
def test_no_requester_ever_meets_the_key_of_another(
    mine: str, other: str, one: str, two: str
) -> None:
    if (mine, one) != (other, two):
        assert scoped_key(mine, one) != scoped_key(other, two)
    assert scoped_key("", one) != scoped_key(mine, two)


def test_a_name_with_a_colon_does_not_meet_the_key_of_another() -> None:
    assert scoped_key("a:b", "c") != scoped_key("a", "b:c")
    assert scoped_key("a:b", "c") != scoped_key("a%3Ab", "c")


def test_the_anonymous_key_stays_as_the_contract_says() -> None:
    assert scoped_key("", "order-17") == "order-17"
    assert scoped_key("r", "order-17") == "@r:order-17"
    assert scoped_key("", "@r:order-17") == "@:@r:order-17"


@pytest.mark.parametrize("key", ["", "x" * (KEY_CHARS_MAX + 1), "line\nbreak", "nul\0"])
def test_a_key_that_no_store_should_hold_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="1 to 255 printable"):
        check_key(key)


def test_the_longest_key_is_accepted() -> None:
    check_key("x" * KEY_CHARS_MAX)


def test_a_short_hash_is_short_and_stable() -> None:
    assert short_hash(b"") == "e3b0c44298fc1c14"
    assert len(short_hash(b"x" * 10_000)) == 16
