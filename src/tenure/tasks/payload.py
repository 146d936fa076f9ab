"""Payloads by type. One that does not fit can never succeed, so it ends the job at once."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from tenure.core.outcome import Fatal

Shape = TypeVar("Shape", bound=msgspec.Struct)

TEXTS_MAX = 512
CHARS_MAX = 200_000


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str


class Chat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`chat`: a prompt or the turns so far."""

    prompt: str = ""
    messages: list[Message] = []
    system: str = ""
    model: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] = []

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError('give either "prompt" or "messages", and not empty')


class Plan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`plan`: a goal to be cut into steps."""

    goal: str
    context: str = ""
    steps_max: int = 10
    model: str = ""

    def __post_init__(self) -> None:
        if not self.goal.strip() or not 1 <= self.steps_max <= 50:
            raise ValueError('"goal" says what to plan and "steps_max" is 1 to 50')


class Code(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`code`: what to write, and what is there already."""

    prompt: str
    language: str = ""
    context: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError('"prompt" says what the code shall do')


class Embed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`embed`: one text or many."""

    input: str | list[str]
    model: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.texts) <= TEXTS_MAX or not all(text.strip() for text in self.texts):
            raise ValueError(f'"input" is a text or 1 to {TEXTS_MAX} texts, none of them empty')

    @property
    def texts(self) -> list[str]:
        """The input as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A text to search, and the name to cite it by."""

    text: str
    id: str = ""


class Rag(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`rag`: a question, and the documents that may know (else the configured folder)."""

    question: str
    documents: list[str | Document] = []
    top_k: int = 4
    chunk_chars: int = 1_000
    answer: bool = True
    model: str = ""

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError('"question" says what to look for')
        if not 1 <= self.top_k <= 50 or not 100 <= self.chunk_chars <= 8_000:
            raise ValueError('"top_k" is 1 to 50 and "chunk_chars" is 100 to 8000')


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool`: which allow-listed tool to use, with which arguments."""

    tool: str
    args: dict[str, str | int | float | bool] = {}


def read(payload: Any, shape: type[Shape]) -> Shape:
    """The payload as its type, or `Fatal` saying what is wrong and which fields there are."""
    try:
        return msgspec.convert(payload, shape)
    except msgspec.ValidationError as error:
        names = ", ".join(field.encode_name for field in msgspec.structs.fields(shape))
        raise Fatal(
            f"the payload of {shape.__name__.lower()!r} does not fit: {error} (fields: {names})"
        ) from None
