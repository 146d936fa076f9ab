"""Masking: by name, in text, in URLs, in JSON within strings; and nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.endpoint import Caller, Refused
from tenure.core.errors import UsageError
from tenure.core.job import JobRecord
from tenure.core.redaction import MASK, USUAL, Redaction

SECRET = "hunter2x"
KEY = "PRIVATE KEY-----"
_NAMES = st.sampled_from(["password", "n", "url", "dbToken", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(f"a://b:{SECRET}@c"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | _NAMES, inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", USUAL)
def test_every_usual_name_masks_in_any_spelling(name: str) -> None:
    redaction = Redaction()
    camel = "".join(part.capitalize() for part in name.split("_"))
    for spelled in (name, name.upper(), name.replace("_", "-"), f"db_{name}", f"my{camel}"):
        assert redaction.masked({"a": [{spelled: SECRET}]}) == {"a": [{spelled: MASK}]}, spelled
        assert SECRET not in redaction.text(f"failed with {spelled}={SECRET}, gave up"), spelled


@pytest.mark.parametrize(
    "text",
    [
        f"could not connect: postgres://bob:{SECRET}@db/x",
        f"postgres://bob:hun/{SECRET}@db/x",
        f"redis://:{SECRET}@cache:6379/0",
        f"https://{SECRET}@git.example/x",
        f"http://ok.example/a,http://u:{SECRET}@h",
        f"GET https://api.example/x?a=1&api_key={SECRET}&b=2 failed",
        f"https://store.example/o?X-Amz-Signature={SECRET}#access_token={SECRET}",
        f"https://maps.example/?key={SECRET}",
        f"https://x/?next=https%3A%2F%2Fu%3A{SECRET}%40h",
        f"Authorization: Bearer {SECRET} and more\nnext line",
        f"got bearer {SECRET} there",
        f"curl -H 'Cookie: a=b; sid={SECRET}; c=d' https://h",
        f"{{'password': '{SECRET}', 'n': 1}}",
        f'request {{"a": {{"api_key": ["{SECRET}"]}}}} failed',
        rf"escaped {{\"token\": \"{SECRET}\", \"n\": 1}}",
        f"Server=x;Password={SECRET};Database=z",
        f"connection string: {SECRET}",
        "key AKIA" + "IOSFODNN7EXAMPLE1",
        f"-----BEGIN RSA {KEY}\n{SECRET}\n-----END RSA {KEY}",
        json.dumps({"a": json.dumps({"token": SECRET})}),
        json.dumps(json.dumps({"password": SECRET})),
        f'{{"password": "{SECRET}", "password": ""}}',
        f'{{"password": "{SECRET}", ',
        f"redis://:12/ab{SECRET}@h/0",
        f"amqp://u:1/{SECRET}@h",
        f"root:{SECRET}@tcp(127.0.0.1:3306)/db",
        f"bob:{SECRET}@db.example:5432",
        f"jdbc:oracle:thin:scott/{SECRET}@//h:1521/x",
        rf"https:\/\/u:{SECRET}@h\/p",
        f"https://h/p?q=1&pass={SECRET}",
        f"https://x/?next=https%253A%252F%252Fu%253A{SECRET}%2540h",
        f"https://x/?a=%2525257Bpassword%2525253A{SECRET}",
        f"PGPASS={SECRET}",
        f"password => {SECRET}",
        f"password := {SECRET}",
        f"password: my {SECRET} phrase, and more",
        f"<password>{SECRET}</password>",
        f"<wsse:Password Type='t'><![CDATA[{SECRET}]]></wsse:Password>",
        f"mysql --password {SECRET} -h db",
        f"curl -u bob:{SECRET} https://h",
        f"https://hooks.slack.com/services/T0/B0/{SECRET}",
        f"<password><![CDATA[a<{SECRET}]]></password>",
        f"<password>\n  <![CDATA[{SECRET}]]></password>",
        f"<password><plain>{SECRET}</plain></password>",
        f'<add key="password" value="{SECRET}"/>',
        f"<add value='{SECRET}>' Name = 'db_password'>",
        f"-----BEGIN PGP {KEY[:-5]} BLOCK-----\n{SECRET}\n-----END PGP {KEY[:-5]} BLOCK-----",
        rf'{{"a": "{{\"pass\\u0077ord\": \"{SECRET}\"}}"}}',
        rf'request {{"pass\u0077ord": "{SECRET}"}} failed',
        f"https://h/?a=1&api%255Fkey={SECRET}",
        f"a=1&api%5Fkey={SECRET}",
        f"pass\u200bword={SECRET}",
        f"\u0440\u0430ssword: {SECRET}",
    ],
)
def test_secrets_within_text_are_masked(text: str) -> None:
    redaction = Redaction()
    for shown in (redaction.text(text), json.dumps(redaction.masked({"a": [{"b": text}]}))):
        assert SECRET not in shown
        assert "EXAMPLE1" not in shown


@pytest.mark.parametrize(
    "value",
    [
        "the host:80 answered 12:30 with a=b",
        "http://h/@scope/package?page=2",
        "docker run -u 1000:1000 -v a:b nginx:1.2@sha256:0f9e --name x",
        "mail bob@example.org, see <b>this</b>; missing key: n",
        {"primary_key": 1, "sortKey": "a", "s3_key": "b", "Idempotency-Key": "c", "key": "d"},
        {"bypass": 1, "compass": "n", "pass_rate": 0.5, "monkey": "m", "keys": [1]},
        ["convert", "--size", "10x10", "-u", "bob"],
        "InvalidTokenError: it has expired",
        "basic authentication is off",
        {"author": "Ada", "shipping": "x", "n": 1, "secret": False, "token": "", "pin": None},
        {"body": '{"a": [1, 2]}', "name": "n", "value": "v"},
        ["name", "value"],
        '<add key="color" value="red"/> <b>50% done: ok</b> <token/>',
        "caf\\u00e9 and a zero\u200bwidth space, \\u0041=b",
        {"\u0440\u043e\u0441\u0442": 1, "name": "n", "value": "v"},
    ],
)
def test_what_is_no_secret_stays_as_it_is(value: Any) -> None:
    assert Redaction().masked(value) == value


@pytest.mark.parametrize(
    "prefix", ["hf_", "npm_", "dop_v1_", "SG.", "ya29.", "hvs.", "pypi-", "ghp_", "glpat-"]
)
def test_tokens_of_usual_services_are_masked_by_their_beginning(prefix: str) -> None:
    assert Redaction().text(f"failed with {prefix + 'a1' * 16}: no") == f"failed with {MASK}: no"


def test_a_pair_may_call_its_value_data() -> None:
    pair = {"name": "password", "data": SECRET}
    assert Redaction().masked([pair]) == [{"name": "password", "data": MASK}]


def test_pairs_of_a_name_and_a_value_are_masked() -> None:
    value = [["Authorization", SECRET], {"Key": "DB_PASSWORD", "Value": SECRET}]
    masked = [["Authorization", MASK], {"Key": "DB_PASSWORD", "Value": MASK}]
    assert Redaction().masked(value) == masked
    assert Redaction().masked({"k": "password", "v": SECRET}) == {"k": "password", "v": MASK}


def test_a_pair_of_a_name_and_a_value_is_masked_among_many_fields() -> None:
    value: dict[str, Any] = {f"n{n}": n for n in range(40)}
    masked = Redaction().masked(value | {"name": "password", "value": SECRET})
    assert masked == value | {"name": "password", "value": MASK}


def test_options_of_a_command_as_a_list_are_masked() -> None:
    value = ["x", "--password", SECRET, "-h", "db", "-u", f"bob:{SECRET}"]
    assert Redaction().masked(value) == ["x", "--password", MASK, "-h", "db", "-u", f"bob:{MASK}"]


@pytest.mark.parametrize(
    "name",
    [
        *("pass", "user_pass", "dbPass", "PGPASS", "pw", "creds", "ssh_key", "license_key"),
        *("deviceKey", "STRIPE_KEY", "\uff50\uff41\uff53\uff53\uff57\uff4f\uff52\uff44"),
        *("pass\u200bword", "p\u00adin", "\u0440assw\u043erd", "P\u0410SSWORD", "pass%2577ord"),
    ],
)
def test_names_that_say_secret_are_masked(name: str) -> None:
    assert Redaction().masked({name: SECRET}) == {name: MASK}
    assert SECRET not in Redaction().text(f"{name}={SECRET}")
    assert Redaction([f"-{name}", "-password"]).masked({name: "x"}) == {name: "x"}


def test_a_text_that_is_very_long_or_nested_very_deep_is_masked_whole() -> None:
    assert Redaction().masked({"a": "b" * 70_000, "c": "d" * 60_000}) == {
        "a": MASK, "c": "d" * 60_000,
    }  # fmt: skip
    nested: Any = "n"
    for _ in range(6):
        nested = json.dumps([nested])
    assert MASK in Redaction().text(nested)


def test_names_and_expressions_are_a_setting() -> None:
    redaction = Redaction(["iban", r"/order-\d+/", "-session"])
    value = {"IBAN": "DE1", "session": "s", "token": "t", "a": "for order-17 of Ada"}
    assert redaction.masked(value) == {
        "IBAN": MASK, "session": "s", "token": MASK, "a": f"for {MASK} of Ada",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"gateway\.redact"):
        Redaction(["/(/"])


@pytest.mark.parametrize(
    "raw", [b'{"a": "hunter2x', b"hunter2x", b"\xff hunter2x", b"[" * 50_000 + b'"hunter2x"']
)
def test_a_payload_that_cannot_be_parsed_is_masked_whole(raw: bytes) -> None:
    job = JobRecord(job_id="1", contract="c", queue="q", task="t", state="s", payload=raw)
    masked = Redaction().record(job)
    assert json.loads(masked.payload) == MASK


def test_a_name_that_stands_twice_hides_both_values() -> None:
    assert SECRET.encode() not in Redaction().raw(b'{"token":"%b","token":""}' % SECRET.encode())


async def test_only_the_requester_sees_a_job_whole() -> None:
    job = JobRecord(
        job_id="1",
        contract="c",
        queue="q",
        task="t",
        state="s",
        payload=b'{"token":"a"}',
        requester="k1",
    )
    redaction = Redaction()
    assert await redaction.shown(job, Caller("k1", frozenset())) is job
    for caller in (Caller("k2", frozenset({"admin"})), Caller("", frozenset({"admin"}))):
        assert (await redaction.shown(job, caller)).payload == '{"token":"•••"}'.encode()


@given(JSON)
def test_a_masked_value_that_is_left_alone_comes_back(value: Any) -> None:
    redaction = Redaction()
    assert redaction.restored(redaction.masked(value), value) == value


@given(JSON)
def test_no_value_that_was_masked_shows_a_secret(value: Any) -> None:
    assert SECRET not in json.dumps(Redaction().masked(value))


def test_a_new_secret_replaces_the_old_one() -> None:
    redaction = Redaction()
    assert redaction.restored({"token": "new"}, {"token": "old"}) == {"token": "new"}


def test_a_mask_in_an_object_that_was_edited_is_not_restored() -> None:
    original = {"n": 1, "headers": [{"name": "Authorization", "value": SECRET}]}
    redaction = Redaction()
    shown = redaction.masked(original)
    assert redaction.restored({**shown, "n": 2}, original) == {**original, "n": 2}
    for headers in (
        [{"name": "Note", "value": MASK}],
        [{"value": MASK}],
        [{"name": "Authorization", "value": MASK, **dict.fromkeys("abcdefghijklmnop", 1)}],
    ):
        with pytest.raises(UsageError, match="still has"):
            redaction.restored({"n": 1, "headers": headers}, original)
    named = {"url": "a", "token": SECRET}  # masked by its own name, whatever is beside it
    assert redaction.restored({"url": "b", "token": MASK}, named) == {**named, "url": "b"}


def test_a_text_that_was_edited_round_its_mask_is_refused() -> None:
    original = {"url": "redis://:secret@a/0", "n": 1}
    redaction = Redaction()
    shown = redaction.masked(original)
    assert redaction.restored({**shown, "n": 2}, original) == {**original, "n": 2}
    with pytest.raises(UsageError, match="still has"):
        redaction.restored({"url": "redis://:•••@b/0"}, original)


_U = 10_000
_NESTED = "a://?x=" * 100 + "%" + "25" * 100 + "41"
_HOSTILE = [
    *("a" * 6 * _U, "eyJ-" * _U, "://" * 2 * _U, "a://b:c/" * _U, "a " * 3 * _U, "[" * 6 * _U),
    *(
        'password="' * _U,
        "token='" * _U,
        "a://b?" + "x=y&" * _U,
        "\\" * 6 * _U + '"',
        "a.-" * 2 * _U,
    ),
    *("-----BEGIN PRIVATE KEY-----" * 2_000, "basic " + "a" * 6 * _U, "a://?a=%41&" * 5_000),
    *(_NESTED + "b" * 5 * _U, "<a " * 2 * _U, "<password>" * 6_000, "-u a:" * _U, "--pw " * _U),
    *("a@b:" * _U, "a:b@c/" * _U, ":\\" * 3 * _U, "password: a,," * 4_000, "token: " * 8_000),
    *("a=>" * 2 * _U, "-" * 6 * _U, "<" * 6 * _U, "@" * 6 * _U, "-u " + "1" * 6 * _U),
    *("," * 6 * _U, "pw: " + "," * 5 * _U, "pw: ,;" * _U, "a" + "\\u005c" * 9_000),
    *("\\" * 5 * _U + "x\\u0070", '<a b="' * _U, '<a k="password" ' * 3_000, "%25" * 2 * _U),
    *("<a " + 'b="c" ' * 9_000, "<password><![CDATA[<" * 3_000, "p\u200b" * 3 * _U),
]


@pytest.mark.alone
@pytest.mark.parametrize("text", _HOSTILE, ids=range(len(_HOSTILE)))
def test_a_hostile_text_costs_time_in_proportion_to_its_length(text: str) -> None:
    begun = time.process_time()
    Redaction().masked([text[:60_000]] * 3 + [text * 4])
    assert time.process_time() - begun < 1.0  # quadratic would be many seconds


@pytest.mark.alone
def test_json_nested_in_strings_is_not_read_once_per_level() -> None:
    quotes = ['"', *("\\" + "u005c" * level + "u0022" for level in range(60))]
    text = "".join(quotes) + "b" * 40_000 + "".join(reversed(quotes))
    inner = text
    for _ in quotes:
        inner = json.loads(inner)
    assert inner == "b" * 40_000
    begun = time.process_time()
    assert MASK in Redaction().text(text)
    assert time.process_time() - begun < 0.3


@pytest.mark.parametrize(
    "name", ["ps" * 500_000, "p_" * 500_000, "-" * 1_000_000, "\ufdfa" * 300_000]
)
def test_a_very_long_name_is_masked_unread(name: str) -> None:
    begun_s = time.process_time()
    assert Redaction().is_secret(name)
    assert time.process_time() - begun_s < 0.05


async def test_as_many_large_jobs_wait_to_be_masked_as_the_gateway_takes() -> None:
    redaction, free = Redaction(), threading.Event()
    large = 100_000
    waiting = [
        asyncio.ensure_future(redaction.in_thread_if_large(large, free.wait)) for _ in range(64)
    ]
    await asyncio.sleep(0)
    try:
        with pytest.raises(Refused, match="try again") as refused:
            await redaction.in_thread_if_large(large, free.wait)
        assert refused.value.code == "busy"
        assert await redaction.in_thread_if_large(10, lambda: "small") == "small"
        patient = asyncio.ensure_future(
            redaction.in_thread_if_large(large, free.wait, may_wait=True)
        )
        waiting.pop().cancel()
    finally:
        free.set()
    assert all(await asyncio.gather(*waiting, patient))
    assert await redaction.in_thread_if_large(large, free.wait)


def test_json_over_its_limit_is_masked_whole_and_unread() -> None:
    raw = json.dumps(["x"] * 60_000).encode()
    assert len(raw) > 256 * 1024
    begun = time.process_time()
    assert (
        Redaction().raw(raw)
        == Redaction().error(raw)
        == json.dumps(MASK, ensure_ascii=False).encode()
    )
    assert time.process_time() - begun < 0.01
