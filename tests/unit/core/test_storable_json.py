"""What every store can hold of a value."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from tenure.core.encoding import (
    INTEGER_MAX,
    JSON_DEPTH_MAX,
    json_fault,
    storable_json,
    whole_text,
    without_nul,
)


def nested(levels: int, inside: Any = '"[{') -> Any:
    for level in range(levels):
        inside = {"]": inside} if level % 2 else [inside, "\\"]
    return inside


@dataclass
class Row:
    name: str
    share: float | None


@pytest.mark.parametrize(
    "value", [None, {"a": None}, [Row("x", None)] * 200, nested(JSON_DEPTH_MAX), [[]] * 500]
)
def test_what_every_store_can_hold_is_written_as_it_is(value: Any) -> None:
    assert storable_json(value) == (msgspec.json.encode(value), False)


@pytest.mark.parametrize(
    "value", [float("nan"), {"a": [float("inf")]}, [Row("x", float("-inf"))], {1: float("nan")}]
)
def test_a_number_that_is_not_json_is_an_error_and_not_null(value: Any) -> None:
    with pytest.raises(ValueError, match="NaN and Infinity"):
        storable_json(value)


@pytest.mark.parametrize("levels", [JSON_DEPTH_MAX + 1, 900, 100_000])
def test_a_value_nested_too_deeply_is_an_error(levels: int) -> None:
    with pytest.raises(ValueError, match="nested deeper"):
        storable_json(nested(levels))


@pytest.mark.parametrize("levels", [JSON_DEPTH_MAX + 1, 600, 900])
def test_half_a_surrogate_pair_that_stands_too_deep_is_an_error(levels: int) -> None:
    value: Any = "\ud83d"
    for _ in range(levels):
        value = [value]
    with pytest.raises(ValueError, match="nested deeper"):
        storable_json(value)


def test_halves_of_surrogate_pairs_are_replaced_wherever_they_stand() -> None:
    value = {"k\udc00": [Row("a\ud83db", 1.5), ("\ud83d\ude00",)], 2: msgspec.Raw(b"[3]")}
    body, replaced = storable_json(value)
    assert replaced
    assert json.loads(body) == {
        "k\ufffd": [{"name": "a\ufffdb", "share": 1.5}, ["\U0001f600"]],
        "2": [3],
    }
    assert whole_text("plain \U0001f600") == "plain \U0001f600"


@pytest.mark.parametrize("text", ["\0", "\\u0000", "\\\0", "\\\\u0000\0\0", '"\0"'])
def test_nul_is_replaced_and_what_only_looks_like_it_is_kept(text: str) -> None:
    assert json.loads(without_nul(json.dumps([text]).encode())) == [text.replace("\0", "\ufffd")]


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"[" * 128 + b"]" * 128, ""),
        (b"[" * 129 + b"]" * 129, "too_deep"),
        (b"[" + b'{"a":[]},' * 90_000 + b"[" * 128 + b"]" * 129, "too_deep"),
        (b'["' + b"[" * 200 + b'","\\"' + b"{" * 200 + b'","\\\\",[]]', ""),
        (b'["\\\\",' + b"[" * 128 + b"]" * 129, "too_deep"),
        (b'["1e400","\\"1e400", "x-1e400"]', ""),
        (b'["\\\\",1e400]', "bad_number"),
        (b"[-1E+400]", "bad_number"),
        (b"[1e-400, 1e-99999999999999999999, 1" + b"0" * 400 + b"e-300]", ""),
        (rb'["\\u0000"]', ""),
        (rb'["\\\u0000"]', "nul"),
    ],
)
def test_what_no_reader_takes_is_found_in_the_text_of_json(raw: bytes, fault: str) -> None:
    assert json_fault(raw) == fault


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (b"9223372036854775807", ""),
        (b"-9223372036854775807", ""),
        (b"9223372036854775808", "bad_number"),
        (b"1e19", "bad_number"),
        (b"0.12345678901234567890123", ""),
    ],
)
def test_a_number_beyond_64_bits_is_found_exactly(number: bytes, fault: str) -> None:
    assert json_fault(b'{"a":[%b]}' % number, number_max=INTEGER_MAX) == fault
