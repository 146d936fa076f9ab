"""Packed lines as columns: the fast way says what the certain way says, whatever stands in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.core.journal import StreamFormat
from tenure.core.registry import journal_format
from tenure.pipeline.schema import COLUMNS, position_number, rows_of
from tenure.pipeline.source.stream_reader import LineParser
from tenure.store.journal import LineFormat

URLS = {
    "streams": "streams+redis://localhost:6379/0",
    "bullmq": "bullmq+redis://localhost:6379/0?queue=q",
    "omniq": "omniq+redis://localhost:6379/0?queue=q",
}
TEXT = st.text(alphabet=st.sampled_from("abé\"'\\ ,;{}\r\n\x00\t"), max_size=6)
NUMBER = st.integers(0, 2**31 - 1).map(str) | st.just("")


def format_of(contract: str) -> StreamFormat:
    fmt = journal_format(URLS[contract])
    assert isinstance(fmt, StreamFormat)
    return fmt


def decoded(contract: str, page: list[Any]) -> Any:
    fmt = format_of(contract)
    lines = LineFormat(fmt.fields, contract=fmt.contract, queue=fmt.queue, task=fmt.task)
    events = [event for entry in page for event in lines.decode(entry)]
    return rows_of(events, "j")


@st.composite
def pages(draw: st.DrawFn) -> tuple[str, list[Any]]:
    contract = draw(st.sampled_from(sorted(URLS)))
    fields = format_of(contract).fields
    numbers = {"ver", "ts_ms", "attempt", "fence", "prev_fence", "lease_until_ms", "due_ms"}
    numbers |= {"prev_lease_until_ms", "max_attempts", "priority"}
    odd = draw(st.booleans())
    plain = st.text(alphabet='abc-:{}"é', max_size=6)
    page = []
    for n in range(draw(st.integers(1, 4))):
        flat: list[bytes] = []
        for _ in range(draw(st.integers(1, 3))):
            width = draw(st.integers(4, len(fields)))
            parts = [
                draw(NUMBER if name in numbers else TEXT if odd and name == "data" else plain)
                for name in fields[:width]
            ]
            flat += [b"e", "\t".join(parts).encode()]
        if draw(st.booleans()):  # the same happened to many jobs
            ids = draw(st.lists(st.text(alphabet="abé-", min_size=1, max_size=6), min_size=1))
            flat = [b"s", b"\t" + flat[1].partition(b"\t")[2]]
            if draw(st.booleans()):
                flat += [b"ids", "\t".join(ids).encode()]
            else:  # as it was written before
                flat += [part for job_id in ids for part in (b"i", job_id.encode())]
        page.append([f"17947888721{n:02d}-{n}".encode(), flat])
    return contract, page


@given(pages())
@settings(deadline=None)
def test_columns_say_what_the_contracts_own_reader_says(drawn: tuple[str, list[Any]]) -> None:
    contract, page = drawn
    fast = LineParser(format_of(contract), "j").batch(page)
    assert fast.to_pylist() == decoded(contract, page).to_pylist()


def test_ids_in_one_field_are_read_as_ids_in_a_field_each() -> None:
    ids = [b"%d-@_.i" % n for n in range(100)] + [b"s", b"ids", "ü é".encode()]
    shared = [b"s", b"\tclaim\t2\t1\ttask\tqueued\trunning\t1\t1"]
    joined = [b"5-0", [*shared, b"ids", b"\t".join(ids)]]
    apart = [b"5-0", [*shared, *(part for job_id in ids for part in (b"i", job_id))]]
    lone = [b"5-0", [*shared, b"ids", ids[0]]]
    parser = LineParser(format_of("streams"), "j")
    assert parser.batch([joined]).equals(parser.batch([apart]))
    assert parser.batch([joined]).to_pylist() == decoded("streams", [joined]).to_pylist()
    assert parser.batch([joined]).column("job_id").to_pylist() == [each.decode() for each in ids]
    assert parser.batch([lone]).equals(parser.batch([joined]).slice(0, 1))


def test_bytes_that_are_no_text_and_numbers_that_are_none_stop_nobody() -> None:
    page = [[b"5-0", [b"e", b"job\tclaim\tx\t1\ttask\xff\tqueued\trunning\t1\t1"]]]
    batch = LineParser(format_of("streams"), "j").batch(page)
    assert batch.to_pylist() == decoded("streams", page).to_pylist()
    assert batch.column("ver")[0].as_py() == 0


def test_places_rise_with_positions() -> None:
    order = ["", "5-0.0", "5-0.1", "5-0", "5-1.0", "5-18446744073709551615", "6-0.0"]
    places = [position_number(position) for position in order]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


GARBLED = [
    "9" * 18,
    "9" * 19,
    "9" * 400,
    str(2**63 - 1),
    str(2**63),
    str(2**31),
    "-1",
    str(-(2**63)),
    "1e9",
    "x",
]


@pytest.mark.parametrize("contract", sorted(URLS))
@pytest.mark.parametrize("number", GARBLED, ids=lambda number: number[:12])
def test_a_number_that_no_reader_can_compute_with_stops_no_page(contract: str, number: str) -> None:
    """One line of another program in a journal would else end every capture of it."""
    fmt = format_of(contract)
    bad = ["bad", "submit", *[number] * (len(fmt.fields) - 2)]
    good = ["good", "submit", "1", "1794794400000"]
    page = [[b"1-0", [b"e", "\t".join(bad).encode()]], [b"2-0", [b"e", "\t".join(good).encode()]]]
    for rows in (LineParser(fmt, "j").batch(page), decoded(contract, page)):
        bad_row, good_row = rows.to_pylist()
        assert (bad_row["job_id"], good_row["job_id"]) == ("bad", "good")
        assert (good_row["ver"], good_row["ts_ms"]) == (1, 1794794400000)
        for name, kind in COLUMNS:
            if kind != "string":
                assert abs(bad_row[name]) <= 2**53, name


def test_an_entry_beyond_the_last_time_has_a_position_all_the_same() -> None:
    line = [b"e", b"job\tsubmit\t1\t5"]
    ids = [b"1-0", b"2199023255552-1", b"18446744073709551615-18446744073709551615"]
    rows = LineParser(format_of("streams"), "j").batch([[each, line] for each in ids])
    found = rows.column("pos").to_pylist()
    assert found == sorted(found)
    assert found == [position_number(f"{each.decode()}.0") for each in ids]
    assert found[-1] < 2**63
