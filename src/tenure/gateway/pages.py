"""The API in words, as one page made on the server.

It loads nothing from anywhere and runs no script; the policy says so to the browser.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tenure.gateway.problems import CODES

MEDIA = "text/html; charset=utf-8"
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}
pre,code{font:14px/1.5 ui-monospace,monospace}
pre{padding:.8rem;border:1px solid #8886;border-radius:.4rem;overflow-x:auto}
table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
h2{margin-top:2rem}h3{margin-bottom:.2rem}
"""
_STYLE_H = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_H}'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)


def docs(document: Mapping[str, Any]) -> bytes:
    """The API document for people, readable without a network."""
    parts = ["<h1>The API of this gateway</h1>", _access()]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation))
    parts.append("<h2>Shapes</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(_shape(name, schema))
    parts.append(_problems())
    return _page("Tenure API", "\n".join(parts))


def _access() -> str:
    return (
        "<p>Machine-readable: <a href='/openapi.json'>/openapi.json</a>. "
        "Send a key as <code>Authorization: Bearer tn_...</code> or <code>X-API-Key</code>; "
        "a gateway without keys is open to this machine only. "
        "Errors are <code>application/problem+json</code>; their codes are listed below.</p>"
    )


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    scope = operation.get("x-scope", "")
    needs = f" &middot; scope <code>{escape(scope)}</code>" if scope else ""
    lines = [
        f"<h3 id='{operation['operationId']}'><code>{method.upper()} {escape(path)}</code></h3>",
        f"<p>{escape(operation['summary'])}{needs}</p>",
    ]
    if "description" in operation:
        lines.append(f"<p>{escape(operation['description'])}</p>")
    if "requestBody" in operation:
        lines.append(f"<p>Body: {_link(operation['requestBody']['content'])}</p>")
    rows = [
        (f"{entry['name']} ({entry['in']})", escape(entry["description"]))
        for entry in operation["parameters"]
    ]
    rows += [
        (status, f"{escape(reply['description'])} {_link(reply.get('content', {}))}")
        for status, reply in operation["responses"].items()
    ]
    lines.append(_table(rows))
    return "\n".join(lines)


def _link(content: Mapping[str, Any]) -> str:
    for media, entry in content.items():
        name = entry["schema"].get("$ref", "").rpartition("/")[2]
        shown = f"<a href='#{name}'>{name}</a>" if name else ""
        return f"{shown} <code>{escape(media)}</code>"
    return ""


def _shape(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (field, escape(_kind(entry)) + ("" if field in required else " (optional)"))
        for field, entry in schema.get("properties", {}).items()
    ]
    text = escape(schema.get("description", ""))
    return f"<h3 id='{escape(name)}'>{escape(name)}</h3><p>{text}</p>{_table(rows)}"


def _kind(entry: Mapping[str, Any]) -> str:
    if "enum" in entry:
        return " | ".join(str(value) for value in entry["enum"])
    if "anyOf" in entry:
        return " | ".join(_kind(each) for each in entry["anyOf"])
    bounds = [f"{sign} {entry[key]}" for key, sign in _BOUNDS if key in entry]
    kind = str(entry.get("type", entry.get("$ref", "any").rpartition("/")[2]))
    return " ".join([kind, *bounds])


_BOUNDS = (("minimum", ">="), ("maximum", "<="), ("maxLength", "length <="))


def _problems() -> str:
    rows = "".join(
        f"<tr id='{code}'><th><code>{code}</code></th><td>{status}</td><td>{escape(text)}</td></tr>"
        for code, (status, text) in CODES.items()
    )
    return f"<h2>Problems</h2><table>{rows}</table>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{text}</td></tr>" for name, text in rows)
    return f"<table>{cells}</table>"


def _page(title: str, body: str) -> bytes:
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>"
    ).encode()
