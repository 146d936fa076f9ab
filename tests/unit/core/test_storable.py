"""What every store can hold of a value."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from leasehold.core.storable import JSON_DEPTH_MAX, to_json, whole_text, without_nul


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
    assert to_json(value) == (msgspec.json.encode(value), False)


@pytest.mark.parametrize(
    "value", [float("nan"), {"a": [float("inf")]}, [Row("x", float("-inf"))], {1: float("nan")}]
)
def test_a_number_that_is_not_json_is_an_error_and_not_null(value: Any) -> None:
    with pytest.raises(ValueError, match="NaN and Infinity"):
        to_json(value)


@pytest.mark.parametrize("levels", [JSON_DEPTH_MAX + 1, 900, 100_000])
def test_a_value_nested_too_deeply_is_an_error(levels: int) -> None:
    with pytest.raises(ValueError, match="nested deeper"):
        to_json(nested(levels))


@pytest.mark.parametrize("levels", [JSON_DEPTH_MAX + 1, 600, 900])
def test_half_a_surrogate_pair_that_stands_too_deep_is_an_error(levels: int) -> None:
    value: Any = "\ud83d"
    for _ in range(levels):
        value = [value]
    with pytest.raises(ValueError, match="nested deeper"):
        to_json(value)


def test_halves_of_surrogate_pairs_are_replaced_wherever_they_stand() -> None:
    value = {"k\udc00": [Row("a\ud83db", 1.5), ("\ud83d\ude00",)], 2: msgspec.Raw(b"[3]")}
    body, replaced = to_json(value)
    assert replaced
    assert json.loads(body) == {
        "k\ufffd": [{"name": "a\ufffdb", "share": 1.5}, ["\U0001f600"]],
        "2": [3],
    }
    assert whole_text("plain \U0001f600") == "plain \U0001f600"


@pytest.mark.parametrize("text", ["\0", "\\u0000", "\\\0", "\\\\u0000\0\0", '"\0"'])
def test_nul_is_replaced_and_what_only_looks_like_it_is_kept(text: str) -> None:
    assert json.loads(without_nul(json.dumps([text]).encode())) == [text.replace("\0", "\ufffd")]
