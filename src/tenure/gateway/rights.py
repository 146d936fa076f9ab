"""Which right every route asks for: collected from the routes themselves, and as a page.

A route that declares no right keeps the gateway from starting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.routing import BaseRoute, Route

from tenure.core.endpoint import Right
from tenure.core.errors import UsageError
from tenure.gateway.dispatch import Resource

_PAGE = """# The right that each route asks for

Made by `tenure api rights` from what the routes declare, which is what the gateway enforces.
[What the words mean](http.md#rights).

| route | scope | whose | changes | audit log | |
|---|---|---|---|---|---|
"""
_AUDIT = {"call": "always", "handler": "always"}


def rights_of(routes: Iterable[BaseRoute], pages: Mapping[str, Right]) -> dict[str, Right]:
    """The right of every `METHOD /path`; `pages` has those of the routes that are no endpoints."""
    found: dict[str, Right] = {}
    for route in routes:
        if isinstance(route, Route) and isinstance(route.app, Resource):
            found |= {f"{method} {route.path}": it for method, it in route.app.rights.items()}
        elif isinstance(route, Route) and route.path in pages:
            methods = sorted((route.methods or set()) - {"HEAD"})
            found |= {f"{method} {route.path}": pages[route.path] for method in methods}
        else:
            raise UsageError(f"{route!r} declares no right; every route names scope and owner")
    return found


def rights_page(rights: Mapping[str, Right]) -> str:
    """The page of the documentation."""
    rows = [_row(route, rights[route]) for route in sorted(rights, key=_by_path)]
    return _PAGE + "\n".join(rows)


def _by_path(route: str) -> tuple[str, ...]:
    method, _, path = route.partition(" ")
    return path, method


def _row(route: str, right: Right) -> str:
    acts = right.does and not route.startswith("GET ")
    cells = (
        f"`{route}`",
        f"`{right.scope}`" if right.scope else "open",
        right.whose,
        right.does if acts else "",
        _AUDIT.get(right.audit, right.audit) if acts else "",
        "streams" if right.streams else "",
    )
    return f"| {' | '.join(cells)} |"
