"""Which stream is asked first: the most urgent, except that every eighth claim begins with another.

So a stream that is always full cannot starve those behind it, and what is urgent waits for at most
one claim in eight.
"""

from __future__ import annotations

EVERY = 8


class Turns:
    """The turns of one plane."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, ...], int] = {}

    def order(self, streams: tuple[str, ...]) -> tuple[str, ...]:
        """The streams in the order in which this claim asks them.

        >>> turns = Turns()
        >>> [turns.order(("high", "low"))[0] for _ in range(9)][6:]
        ['high', 'low', 'high']
        """
        if len(streams) < 2:
            return streams
        number = self._claims.get(streams, 0) + 1
        self._claims[streams] = number
        if number % EVERY:
            return streams
        first = 1 + (number // EVERY - 1) % (len(streams) - 1)
        return (streams[first], *streams[:first], *streams[first + 1 :])
