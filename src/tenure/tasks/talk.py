"""`chat`, `plan` and `code`: one conversation with the model, told three ways.

The tokens go out as events while the model writes; the whole text, what was made of it and what it
cost are the result.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tenure.core.outcome import Retry
from tenure.tasks import payload as shapes
from tenure.tasks.running import Running
from tenure.tasks.server import ModelServer
from tenure.tasks.tokens import TokenFeed

_PLAN = (
    "You plan work. Answer only with a JSON array of at most {steps_max} short strings, "
    "each one step, in order. No other text."
)
_CODE = (
    "You write {language}code. Answer with one fenced code block that is complete and runs, "
    "then at most three sentences about it."
)
_FENCE = re.compile(r"```([\w+#.-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_NUMBERED = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+(.*\S)", re.MULTILINE)


async def chat(job: Running, server: ModelServer) -> dict[str, Any]:
    """Answer a prompt or a conversation."""
    asked = shapes.read(job.payload, shapes.Chat)
    turns = [{"role": turn.role, "content": turn.content} for turn in asked.messages]
    if asked.prompt:
        turns = [{"role": "user", "content": asked.prompt}]
    if asked.system:
        turns = [{"role": "system", "content": asked.system}, *turns]
    options = {
        name: value
        for name in ("temperature", "max_tokens", "stop")
        if (value := getattr(asked, name)) not in (None, [])
    }
    return await converse(job, server, turns, model=asked.model, options=options)


async def plan(job: Running, server: ModelServer) -> dict[str, Any]:
    """Cut a goal into steps; the result has them as a list."""
    asked = shapes.read(job.payload, shapes.Plan)
    wish = asked.goal + (f"\n\nContext:\n{asked.context}" if asked.context else "")
    turns = [
        {"role": "system", "content": _PLAN.format(steps_max=asked.steps_max)},
        {"role": "user", "content": wish},
    ]
    answer = await converse(job, server, turns, model=asked.model)
    return answer | {"steps": steps_of(answer["text"])[: asked.steps_max]}


async def code(job: Running, server: ModelServer) -> dict[str, Any]:
    """Write code; the result has the block by itself beside the whole answer."""
    asked = shapes.read(job.payload, shapes.Code)
    language = f"{asked.language} " if asked.language else ""
    wish = asked.prompt + (f"\n\nWhat is there:\n{asked.context}" if asked.context else "")
    turns = [
        {"role": "system", "content": _CODE.format(language=language)},
        {"role": "user", "content": wish},
    ]
    answer = await converse(job, server, turns, model=asked.model)
    found = code_of(answer["text"])
    return answer | {"code": found[1], "language": found[0] or asked.language}


async def converse(
    job: Running,
    server: ModelServer,
    turns: list[dict[str, str]],
    *,
    model: str = "",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Let the model answer, its tokens going out as events of type `token`."""

    async def send(text: str) -> None:
        await job.report(None, "model", type="token", data={"text": text})

    parts: list[str] = []
    finish, usage = "", None
    async with TokenFeed(send) as feed:
        async for piece in server.chat(turns, model=model, options=options or {}):
            finish, usage = piece.finish_reason or finish, piece.usage or usage
            if piece.text:
                parts.append(piece.text)
                feed.add(piece.text)
    if not parts:
        raise Retry(None, "the model answered nothing")
    used = model or await server.default_model()
    return {"text": "".join(parts), "model": used, "finish_reason": finish, "usage": usage}


def steps_of(text: str) -> list[str]:
    """The steps in an answer: the JSON array it should be, else its numbered or dashed lines.

    >>> steps_of('Sure: ["dig", "plant"]'), steps_of("1. dig\\n2. plant"), steps_of("just dig")
    (['dig', 'plant'], ['dig', 'plant'], ['just dig'])
    """
    start, end = text.find("["), text.rfind("]")
    if 0 <= start < end:
        try:
            return msgspec.json.decode(text[start : end + 1], type=list[str])
        except msgspec.MsgspecError:
            pass
    return _NUMBERED.findall(text) or [line.strip() for line in text.splitlines() if line.strip()]


def code_of(text: str) -> tuple[str, str]:
    """The language and body of the first fenced block; without one, the whole text is the code.

    >>> code_of("Here:\\n```python\\nprint(1)\\n```\\nDone.")
    ('python', 'print(1)\\n')
    """
    found = _FENCE.search(text)
    return (found[1], found[2]) if found else ("", text)
