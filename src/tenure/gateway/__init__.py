"""The gateway: HTTP and server-sent events over any queues, as a FastAPI application.

    from tenure.gateway import GatewaySettings, create_app, router

    app = create_app(GatewaySettings(queues=("streams+redis://127.0.0.1:6379/0",)))

`tenure.gateway:app` is such an application with the settings of the environment and tenure.toml,
for any ASGI server: `uvicorn tenure.gateway:app --workers 4`. `router` is for an application of
your own: `mine.include_router(router(settings), prefix="/queue")`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tenure.core.endpoint import Caller
    from tenure.gateway.application import create_app, router
    from tenure.gateway.auth import CallerHook
    from tenure.gateway.settings import GatewaySettings

    app: FastAPI

__all__ = ["Caller", "CallerHook", "GatewaySettings", "app", "create_app", "router"]

_PLACES = {
    "Caller": "tenure.core.endpoint",
    "CallerHook": "tenure.gateway.auth",
    "GatewaySettings": "tenure.gateway.settings",
    "create_app": "tenure.gateway.application",
    "router": "tenure.gateway.application",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line needs only some modules."""
    if name == "app":
        # The command line is the layer above, and it alone reads the environment.
        found = import_module("tenure.cli.serve").gateway_app()
    elif name in _PLACES:
        found = getattr(import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
