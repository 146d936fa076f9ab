"""Sample handlers for a first look, when no model is set up. They do not pretend to be one.

Every result says `"sample": true` and which setting brings the real thing. They take the payloads
of the real tasks; `"sample"` in a payload may ask for `steps`, a `delay_s` each, and for the first
`fail` attempts to fail, so that a demonstration shows retries and failures too.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec

from tenure.core.outcome import Fatal
from tenure.tasks.running import Running

NOTES = {
    "chat": "no model configured: set TENURE_LLM_URL",
    "plan": "no model configured: set TENURE_LLM_URL",
    "code": "no model configured: set TENURE_LLM_URL",
    "embed": "no model configured: install tenure[embed] or set TENURE_LLM_URL",
    "rag": "no model configured: install tenure[embed] or set TENURE_LLM_URL",
    "tool": "no tools configured: set TENURE_TOOLS",
}
_TEXT = (
    "This is a sample answer, made of fixed words and no model. "
    "It shows how tokens arrive as events while a job runs."
)


class Play(msgspec.Struct, forbid_unknown_fields=True):
    """How a sample job shall behave."""

    steps: int = 5
    delay_s: float = 0.1
    fail: int = 0


async def sample(job: Running, task: str) -> dict[str, Any]:
    """Pretend to nothing: report some steps, and return what the task's result looks like."""
    play = _play(job.payload)
    words = _TEXT.split()
    for number in range(play.steps):
        await asyncio.sleep(play.delay_s)
        if job.attempt <= play.fail and number >= play.steps // 2:
            raise SampleFailure(f"this sample was asked to fail {play.fail} times")
        if task in ("chat", "plan", "code"):
            share = words[
                number * len(words) // play.steps : (number + 1) * len(words) // play.steps
            ]
            await job.report(None, "sample", type="token", data={"text": " ".join(share) + " "})
        else:
            await job.report(round(100 * (number + 1) / play.steps), f"step {number + 1}")
    return {"sample": True, "note": NOTES[task], **_shape(task, job.payload)}


class SampleFailure(Exception):
    """The failure that a sample job was asked for."""

    code = "sample_failure"


def unavailable(task: str) -> Fatal:
    """What a worker without samples says to a task that it has no means for."""
    return Fatal(f"this worker cannot do {task!r}: {NOTES[task]}")


def _play(payload: Any) -> Play:
    wish = payload.get("sample", {}) if isinstance(payload, dict) else {}
    try:
        play = msgspec.convert(wish, Play)
    except msgspec.ValidationError as error:
        raise Fatal(f'the payload\'s "sample" does not fit: {error}') from None
    if not (1 <= play.steps <= 1000 and 0 <= play.delay_s <= 60 and play.fail >= 0):
        raise Fatal('the payload\'s "sample" takes 1 to 1000 "steps" and up to 60 s "delay_s"')
    return play


def _shape(task: str, payload: Any) -> dict[str, Any]:
    match task:
        case "chat":
            return {"text": _TEXT}
        case "plan":
            return {"text": _TEXT, "steps": ["set TENURE_LLM_URL", "submit this plan again"]}
        case "code":
            return {"text": _TEXT, "code": 'print("sample")\n', "language": "python"}
        case "embed":
            # Numbers from a hash: right in shape, empty of meaning, the same for the same text.
            digest = hashlib.sha256(repr(payload).encode()).digest()
            return {"embeddings": [[byte / 255 for byte in digest[:8]]], "dimensions": 8}
        case "rag":
            return {"passages": [], "answer": None}
        case _:
            return {"tool": None}
