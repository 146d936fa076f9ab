"""A control plane from a worker's side: does its gateway answer, and is it ready."""

from __future__ import annotations

import urllib.error
import urllib.request

from tenure.cli.checks.finding import Finding


def remote_findings(store: str, name: str) -> list[Finding]:
    """`/livez` and `/readyz` of the gateway; blocking."""
    found = []
    for check, path, remedy in (
        ("gateway", "/livez", "start it: tenure gateway --from plane+sqlite:///plane.db"),
        ("gateway ready", "/readyz?verbose", "its store does not answer: tenure doctor there"),
    ):
        try:
            with urllib.request.urlopen(f"{_base(store)}{path}", timeout=5) as answer:  # nosec B310 # plane+http(s)
                found.append(Finding("ok", check, f"{name} answers {answer.status}"))
        except urllib.error.HTTPError as error:
            found.append(Finding("problem", check, f"{name} answers {error.code}", remedy))
        except (OSError, ValueError) as error:
            return [*found, Finding("problem", check, f"{name}: {error}", remedy)]
    return found


def _base(store: str) -> str:
    """The gateway's address: without key and options.

    >>> _base("http://:key@host:8470/?streams=a")
    'http://host:8470'
    """
    scheme, _, rest = store.partition("://")
    authority = rest.partition("?")[0].partition("/")[0]
    return f"{scheme}://{authority.rpartition('@')[2]}"
