"""What is read from a URL, and which rules the allow list takes."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.errors import UsageError
from tenure.egress import Guard, Policy, RequestRefused, read_target
from tenure.egress.guard import is_public


@pytest.mark.clause("I-53")
def test_a_plain_url_is_read_into_its_parts() -> None:
    target = read_target("https://Hooks.Example:8443/in?x=1#part")
    assert (target.scheme, target.host, target.port) == ("https", "hooks.example", 8443)
    assert target.path == "/in?x=1"
    assert target.authority == "hooks.example:8443"


@pytest.mark.clause("I-53")
def test_what_may_be_shown_of_a_url_holds_no_path_and_no_query() -> None:
    target = read_target("https://hooks.example/secret-path?token=secret-query")
    assert target.origin == "https://hooks.example"


@pytest.mark.clause("I-53")
@given(st.text(max_size=60))
def test_any_text_is_either_read_or_refused(text: str) -> None:
    try:
        target = read_target(f"https://{text}")
    except RequestRefused:
        return
    assert target.host
    assert target.path.startswith("/")
    assert " " not in target.path


@pytest.mark.clause("I-53")
@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "2a00:1450::1"])
def test_addresses_of_the_open_internet_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.clause("I-53")
@given(st.ip_addresses(v=4))
def test_nothing_private_or_reserved_counts_as_public(address: ipaddress.IPv4Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved:
        # These two are special-purpose blocks that are forwarded like any other.
        services = [
            ipaddress.ip_network("192.31.196.0/24"),
            ipaddress.ip_network("192.52.193.0/24"),
        ]
        assert not is_public(address) or any(address in block for block in services)


@pytest.mark.clause("I-53")
@pytest.mark.parametrize(
    ("rule", "url", "passes"),
    [
        ("10.0.0.0/8", "http://10.1.2.3:9000/", True),
        ("10.0.0.0/8", "http://11.1.2.3:9000/", False),
        ("127.0.0.1:9000", "http://127.0.0.1:9000/", True),
        ("127.0.0.1:9000", "http://127.0.0.1:9001/", False),
        ("[::1]:9000", "http://[::1]:9000/", True),
        ("fd00::/8", "http://[fd12::1]/", True),
        ("::1", "http://[::1]:7/", True),
    ],
)
def test_the_allow_list_opens_what_it_names_and_no_more(rule: str, url: str, passes: bool) -> None:
    guard = Guard(Policy(allow=(rule,)))
    if passes:
        guard.check_url(url)
    else:
        with pytest.raises(RequestRefused):
            guard.check_url(url)


@pytest.mark.clause("I-53")
@pytest.mark.parametrize(
    ("rule", "host", "named"),
    [
        ("hooks.internal", "hooks.internal", True),
        ("hooks.internal", "xhooks.internal", False),
        ("*.svc.internal", "a.svc.internal", True),
        ("*.svc.internal", "svc.internal", False),
        ("hooks.internal:81", "hooks.internal", False),
    ],
)
def test_names_on_the_allow_list_match_whole_labels(rule: str, host: str, named: bool) -> None:
    assert Policy(allow=(rule,)).allows_name(read_target(f"http://{host}/")) is named


@pytest.mark.clause("I-53")
@pytest.mark.parametrize("rule", ["", "a/b", "10.0.0.1/8", "a*b", "x:99999", "[zz]:1"])
def test_a_rule_that_cannot_be_read_is_an_error_at_once(rule: str) -> None:
    with pytest.raises(UsageError, match="allow list"):
        Policy(allow=(rule,))


@pytest.mark.clause("I-53")
def test_without_an_allow_list_plain_http_is_refused_before_any_lookup() -> None:
    with pytest.raises(RequestRefused, match="only https"):
        Guard().check_url("http://hooks.example/")
    with pytest.raises(RequestRefused, match="ports are 443, 8443"):
        Guard().check_url("https://hooks.example:22/")
