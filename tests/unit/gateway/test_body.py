"""Bodies of requests: JSON whose numbers every reader downstream can take."""

import msgspec
import pytest

from tenure.gateway.dispatch import decode
from tenure.gateway.problems import Problem


class Body(msgspec.Struct):
    payload: msgspec.Raw


def read(number: str) -> Body:
    raw = f'{{"payload":{{"a":{number}}}}}'.encode()
    body: Body = decode(msgspec.json.Decoder(Body), raw)
    return body


@pytest.mark.parametrize(
    "number", ["1e999", "9" * 250 + "e99", "9" * 210 + "E+99", "9" * 299 + "e10", "1.5e0999"]
)
def test_a_number_that_no_double_holds_is_refused(number: str) -> None:
    with pytest.raises(Problem) as raised:
        read(number)
    assert raised.value.code == "bad_number"


@pytest.mark.parametrize("number", ["1e99", "9" * 199 + "e99", "0." + "9" * 250, "9" * 250])
def test_a_large_number_that_a_double_holds_is_kept(number: str) -> None:
    assert float(msgspec.json.decode(bytes(read(number).payload))["a"]) == float(number)


def test_a_deep_body_of_the_wrong_shape_with_bytes_that_are_no_text_is_refused() -> None:
    raw = b'{"other":"\xb4","deep":' + b"[" * 140 + b"]" * 140 + b"}"
    with pytest.raises(Problem) as raised:
        decode(msgspec.json.Decoder(list[int]), raw)
    assert raised.value.code == "bad_json"
