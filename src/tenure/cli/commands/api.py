"""`tenure api`: the documents that describe what a gateway speaks, for tools and clients."""

from __future__ import annotations

import click

from tenure.cli.output import emit_text
from tenure.core.errors import UsageError


@click.command("api", short_help="Print the OpenAPI or AsyncAPI document, or the rights.")
@click.argument("which", type=click.Choice(["openapi", "asyncapi", "rights"]))
def command(which: str) -> None:
    """Print what a gateway that serves all five contracts speaks; it need not run.

    \b
    tenure api openapi > openapi.json      # what can be asked of it, for client generators
    tenure api asyncapi > asyncapi.json    # event streams and webhooks: what it says by itself
    tenure api rights > rights.md          # the scope each route asks for, and on whose objects

    A running gateway serves its own, with the contracts it has: /openapi.json, /asyncapi.json.
    """
    import msgspec

    made = described(which)
    emit_text((made if which == "rights" else msgspec.json.format(made, indent=1)).decode())


def described(which: str) -> bytes:
    """The document, made from the endpoints themselves. Nothing is connected to."""
    try:
        from tenure.gateway.app import Gateway
        from tenure.gateway.dispatch import rights_page
        from tenure.gateway.settings import GatewaySettings
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; install the gateway: pip install 'tenure[gateway]'") from None
    redis = "redis://127.0.0.1:6379/0"
    queues = (
        f"streams+{redis}",
        f"bullmq+{redis}?queue=jobs",
        f"omniq+{redis}?queue=jobs",
        "inbox+sqlite:///jobs.db",
        "plane+sqlite:///jobs.db",
    )
    gateway = Gateway(GatewaySettings(queues=queues))
    if which == "rights":
        return rights_page(gateway.rights).encode()
    return gateway.openapi if which == "openapi" else gateway.asyncapi
