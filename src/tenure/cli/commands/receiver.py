"""`tenure receiver`: a page that shows webhooks as they arrive, verified."""

from __future__ import annotations

from typing import Any

import click

from tenure.cli.config import load_config
from tenure.cli.output import emit_text, note
from tenure.cli.parent import end_with_parent
from tenure.core.errors import UsageError


@click.command("receiver", short_help="Receive webhooks and show them on a page.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8471, help="On loopback (8471).")
@click.option("--requester", default="*", help="Whose secrets of webhooks.secrets to verify with.")
@click.option("--parent", type=int, default=0, hidden=True)
def command(port: int, requester: str, parent: int) -> None:
    """Receive webhooks on http://127.0.0.1:PORT/hooks, verify them, and show the last ones.

    The secrets are those of TENURE_WEBHOOKS_SECRETS. Without any, a secret is made and printed.
    The sender must be allowed to reach loopback: TENURE_EGRESS_ALLOW=127.0.0.1:8471.

    \b
    tenure receiver --port 8471
    """
    end_with_parent(parent)
    try:
        import uvicorn
    except ImportError:
        raise UsageError("the receiver needs a web server: pip install 'tenure[inbox]'") from None
    from tenure.webhooks.receiver import ReceiverPage

    app = _kept_local(ReceiverPage(_secrets(requester)))
    note(f"receiving on http://127.0.0.1:{port}/hooks, shown on http://127.0.0.1:{port}/")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")


def _kept_local(page: Any) -> Any:
    """The page for requests to a name of this machine: no site reads it by a name of its own."""
    from tenure.gateway.settings import is_local_host

    async def app(scope: Any, receive: Any, send: Any) -> None:
        hosts = [text.decode("latin-1") for name, text in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and is_local_host(hosts[0]):
            await page(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 421, "headers": []})
            await send({"type": "http.response.body", "body": b"use http://127.0.0.1\n"})

    return app


def _secrets(requester: str) -> list[bytes]:
    import asyncio

    from tenure.webhooks import new_secret, read_secret
    from tenure.webhooks.signing import read_secrets

    known = read_secrets(load_config().text("webhooks.secrets"))
    live = asyncio.run(known.live(requester))
    if live:
        return [one.reveal() for one in live]
    made = new_secret()
    emit_text(made)
    note("no secret is set; this one was made for now")
    return [read_secret(made)]
