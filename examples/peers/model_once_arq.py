from typing import Any


async def startup(ctx: dict[str, Any]) -> None:
    print("loading the model", flush=True)
    ctx["model"] = {"tea": 4.5, "cake": 6.0}


async def price(ctx: dict[str, Any], item: str) -> float:
    return ctx["model"][item]


class WorkerSettings:
    functions = (price,)
    on_startup = startup
