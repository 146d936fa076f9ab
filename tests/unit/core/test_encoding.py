"""JSON as other programs write it: half a surrogate pair is a value, not a fault."""

import msgspec
import pytest

from tenure.core.encoding import from_json, shown_json, to_json

HALF = chr(0xD800)
RAW = rb'{"half":"\ud800","whole":"\ud83d\ude00"}'


def test_half_a_surrogate_pair_in_valid_json_is_a_value() -> None:
    assert from_json(RAW) == {"half": HALF, "whole": chr(0x1F600)}
    assert from_json(rb'{"\udc00":[1.5,null,true]}') == {chr(0xDC00): [1.5, None, True]}


def test_what_is_written_from_it_reads_the_same() -> None:
    assert from_json(to_json({"half": HALF})) == {"half": HALF}


def test_what_is_shown_of_it_is_utf_8() -> None:
    assert msgspec.json.encode(shown_json(RAW)).decode().startswith('{"half":"�"')


@pytest.mark.parametrize("raw", [b"", b"[", b"NaN", b"[Infinity]", b'"\xff"', b"[" * 100_000])
def test_what_is_no_json_is_still_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        from_json(raw)
    assert set(shown_json(raw)) == {"_raw"}
