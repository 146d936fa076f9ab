"""The AsyncAPI document, made from the endpoints, and the page /docs, made from OpenAPI's."""

from __future__ import annotations

import hashlib
import inspect
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from tenure import __version__
from tenure.core.endpoint import STREAM, Endpoint
from tenure.core.errors import UsageError
from tenure.dashboard.watch import Series, Tick
from tenure.gateway.problems import CODES
from tenure.gateway.sse import Hello
from tenure.sql.engine import ROW_MACHINE
from tenure.webhooks.signing import WebhookEvent, WebhookHeaders

_REF = "#/components/schemas/{name}"


def components(types: list[Any]) -> dict[str, Any]:
    """The schemas of these types by name; two types with the same name are refused."""
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    doubled = [name for name in schemas if "." in name]
    if doubled:
        raise UsageError(f"two types of the API have one name, so rename one: {doubled}")
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    return schemas


def asyncapi_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """An AsyncAPI 3.0 document: the event streams of these endpoints, /live and the webhooks."""
    streams = [e for e in endpoints if any(r.media == STREAM for r in e.replies.values())]
    shapes = {
        endpoint.operation: reply.shape
        for endpoint in streams
        for reply in endpoint.replies.values()
        if reply.media == STREAM
    }
    types = [*dict.fromkeys(shapes.values()), Hello, Series, Tick, WebhookEvent, WebhookHeaders]
    schemas = components(types)
    schemas["WebhookEvent"]["properties"]["status"]["enum"] = list(ROW_MACHINE.states)
    channels = {e.operation: _stream(e, shapes[e.operation]) for e in streams}
    channels |= {"live": _LIVE, "webhook": _WEBHOOK}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tenure",
            "version": __version__,
            "description": "The messages that Tenure sends: the events of a job while it runs, the "
            "live updates of the dashboard, and the webhooks of the outbox. Requests are described "
            "in the OpenAPI document.",
            "license": {"name": "MIT"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "gateway": {
                "host": "127.0.0.1:8470",
                "protocol": "http",
                "description": "A gateway; event streams are answers to GET requests.",
            },
            "receiver": {
                "host": "{host}",
                "protocol": "https",
                "description": "The receiver that a job names in `status_webhook_url`.",
                "variables": {"host": {"default": "receiver.example"}},
            },
        },
        "channels": channels,
        "operations": {name: _send_operation(name, channel) for name, channel in channels.items()},
        "components": {
            "messages": {
                **{
                    f"{name}News": _event_message(shape, f"An event of a job ({name}).")
                    for name, shape in shapes.items()
                },
                "Hello": _event_message(Hello, "The first frame: the job of this stream."),
                "Series": _event_message(Series, "The first frame: the last 15 minutes."),
                "Tick": _event_message(
                    Tick, "The jobs that changed, and the figures of new seconds."
                ),
                "WebhookEvent": {
                    "summary": "A step of a job of the inbox, signed.",
                    "headers": _message_schema(WebhookHeaders),
                    "payload": _message_schema(WebhookEvent),
                },
            },
            "schemas": schemas,
        },
    }


def _stream(endpoint: Endpoint, shape: Any) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", endpoint.path)
    channel: dict[str, Any] = {
        "address": endpoint.path,
        "title": endpoint.summary,
        "description": f"{endpoint.description} Frames are server-sent events: `event` is the type "
        "of the news, `data` its JSON, `id` the position from which `Last-Event-ID` goes on. "
        f"Scope: {endpoint.right.scope}.".strip(),
        "servers": [{"$ref": "#/servers/gateway"}],
        "messages": _refs("Hello", f"{endpoint.operation}News"),
    }
    if names:
        channel["parameters"] = {name: {"description": "The job's id."} for name in names}
    return channel


def _send_operation(name: str, channel: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "action": "send",
        "channel": {"$ref": f"#/channels/{name}"},
        "summary": channel["title"],
        "messages": [
            {"$ref": f"#/channels/{name}/messages/{each}"} for each in channel["messages"]
        ],
    }


def _event_message(shape: Any, summary: str) -> dict[str, Any]:
    return {"summary": summary, "payload": _message_schema(shape)}


def _message_schema(shape: Any) -> dict[str, str]:
    return {"$ref": _REF.format(name=shape.__name__)}


def _refs(*names: str) -> dict[str, dict[str, str]]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


_LIVE = {
    "address": "/live",
    "title": "Live updates of the dashboard",
    "description": "Server-sent events, at most four a second: `series` once, then `tick`. "
    "`?queue=NAME` selects one queue. Scope: observe.",
    "servers": [{"$ref": "#/servers/gateway"}],
    "messages": _refs("Series", "Tick"),
}
_WEBHOOK = {
    "address": "{status_webhook_url}",
    "title": "Webhooks of the inbox",
    "description": "A POST for every change of a job's state, until it is answered with 2xx or "
    "given up; in order within a job.",
    "parameters": {"status_webhook_url": {"description": "As the job names it."}},
    "servers": [{"$ref": "#/servers/receiver"}],
    "messages": _refs("WebhookEvent"),
}


HTML = "text/html; charset=utf-8"
BASE_MARK = "@base@"
"""Stands in the page for the prefix under which the gateway is served."""

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


def docs_page(document: Mapping[str, Any]) -> bytes:
    """The OpenAPI document as an HTML page that needs no network; it contains `BASE_MARK`."""
    parts = ["<h1>The API of this gateway</h1>", _access()]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation_html(path, method, operation))
    parts.append("<h2>Shapes</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(_shape(name, schema))
    parts.append(_problems())
    return _page("Tenure API", "\n".join(parts))


def _access() -> str:
    return (
        f"<p>Machine-readable: <a href='{BASE_MARK}/openapi.json'>/openapi.json</a>. "
        "Send a key as <code>Authorization: Bearer tn_...</code> or <code>X-API-Key</code>; "
        "a gateway without keys is open to this machine only. "
        "Errors are <code>application/problem+json</code>; their codes are listed below.</p>"
    )


def _operation_html(path: str, method: str, operation: Mapping[str, Any]) -> str:
    scope = operation.get("x-scope", "")
    needs = f" &middot; scope <code>{escape(scope)}</code>" if scope else ""
    lines = [
        f"<h3 id='{operation['operationId']}'><code>{method.upper()} {escape(path)}</code></h3>",
        f"<p>{escape(operation.get('summary', ''))}{needs}</p>",
    ]
    if "description" in operation:
        lines.append(f"<p>{escape(operation['description'])}</p>")
    if "requestBody" in operation:
        lines.append(f"<p>Body: {_link(operation['requestBody']['content'])}</p>")
    rows = [
        (f"{entry['name']} ({entry['in']})", escape(entry.get("description", "")))
        for entry in operation.get("parameters", ())
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
