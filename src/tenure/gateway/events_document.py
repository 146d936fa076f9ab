"""The AsyncAPI document: what Tenure says by itself, in event streams and webhooks.

Event streams of contracts are found among the endpoints, as those that answer `text/event-stream`;
the page's own stream and the webhooks of the outbox stand beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tenure import __version__
from tenure.core.endpoint import Endpoint
from tenure.core.state import INBOX
from tenure.dashboard.live import Series, Tick
from tenure.gateway.document import components
from tenure.gateway.frames import Hello
from tenure.webhooks.signing import WebhookEvent, WebhookHeaders

_REF = "#/components/schemas/{name}"
_STREAM = "text/event-stream"


def events_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """An AsyncAPI 3.0 document of the streams among these endpoints, and of all else we send."""
    streams = [e for e in endpoints if any(r.media == _STREAM for r in e.replies.values())]
    shapes = {
        endpoint.operation: reply.shape
        for endpoint in streams
        for reply in endpoint.replies.values()
        if reply.media == _STREAM
    }
    types = [*dict.fromkeys(shapes.values()), Hello, Series, Tick, WebhookEvent, WebhookHeaders]
    schemas = components(types)
    schemas["WebhookEvent"]["properties"]["status"]["enum"] = list(INBOX.states)
    channels = {e.operation: _stream(e, shapes[e.operation]) for e in streams}
    channels |= {"live": _LIVE, "webhook": _WEBHOOK}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tenure",
            "version": __version__,
            "description": "What Tenure says by itself: the events of a job while it runs, the "
            "pulse of the dashboard, and the webhooks of the outbox. What can be asked of it is in "
            "the OpenAPI document.",
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
                "description": "Whoever a job names in `status_webhook_url`.",
                "variables": {"host": {"default": "receiver.example"}},
            },
        },
        "channels": channels,
        "operations": {name: _sent(name, channel) for name, channel in channels.items()},
        "components": {
            "messages": {
                **{
                    f"{name}News": _event_message(shape, f"An event of a job ({name}).")
                    for name, shape in shapes.items()
                },
                "Hello": _event_message(Hello, "The first frame: whose events these are."),
                "Series": _event_message(Series, "The first frame: a quarter of an hour."),
                "Tick": _event_message(Tick, "What moved, and the seconds that are over."),
                "WebhookEvent": {
                    "summary": "A step of a job of the inbox, signed.",
                    "headers": _schema(WebhookHeaders),
                    "payload": _schema(WebhookEvent),
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


def _sent(name: str, channel: Mapping[str, Any]) -> dict[str, Any]:
    """We send, whoever is connected receives."""
    return {
        "action": "send",
        "channel": {"$ref": f"#/channels/{name}"},
        "summary": channel["title"],
        "messages": [
            {"$ref": f"#/channels/{name}/messages/{each}"} for each in channel["messages"]
        ],
    }


def _event_message(shape: Any, summary: str) -> dict[str, Any]:
    return {"summary": summary, "payload": _schema(shape)}


def _schema(shape: Any) -> dict[str, str]:
    return {"$ref": _REF.format(name=shape.__name__)}


def _refs(*names: str) -> dict[str, dict[str, str]]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


_LIVE = {
    "address": "/live",
    "title": "The pulse of the dashboard",
    "description": "Server-sent events, four a second at most: `series` once, then `tick`. Only of "
    "one queue with `?queue=NAME`. Scope: observe.",
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
