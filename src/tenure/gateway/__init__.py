"""The gateway: HTTP and server-sent events over any queues, as a FastAPI application.

    from tenure.gateway import GatewaySettings, create_app, router

    app = create_app(GatewaySettings(queues=("streams+redis://127.0.0.1:6379/0",)))

`tenure.gateway:app` is such an application with the settings of the environment and tenure.toml,
for any ASGI server: `uvicorn tenure.gateway:app --workers 4`. `router` is for an application of
your own: `mine.include_router(router(settings), prefix="/queue")`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tenure.core.errors import TenureError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from tenure.core.endpoint import Caller
    from tenure.gateway.application import create_app, router
    from tenure.gateway.auth import CallerHook
    from tenure.gateway.settings import GatewaySettings

__all__ = ["Caller", "CallerHook", "GatewaySettings", "app", "create_app", "router"]

_PLACES = {
    "Caller": "tenure.core.endpoint",
    "CallerHook": "tenure.gateway.auth",
    "GatewaySettings": "tenure.gateway.settings",
    "create_app": "tenure.gateway.application",
    "router": "tenure.gateway.application",
}


@cache
def _made() -> FastAPI:
    # The command line is the layer above, and it alone reads the environment.
    found: FastAPI = import_module("tenure.cli.serve").gateway_app()
    return found


class _App:
    """The application `app`, made when it is first used.

    It is a name of the module itself, because hypercorn asks no `__getattr__` of a module. Servers
    show the message of a start that failed, and would take an error here for a missing lifespan.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            made = _made()
        except TenureError as error:
            if scope["type"] != "lifespan":
                raise
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
        else:
            await made(scope, receive, send)

    def __getattr__(self, name: str) -> Any:
        return getattr(_made(), name)


app: FastAPI = _App()  # type: ignore[assignment]  # it has all that a FastAPI has


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line needs only some modules."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return found
