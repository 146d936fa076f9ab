"""Which stream is asked first: the most urgent; with fairness every so many claims begin elsewhere.

So a stream that is always full cannot starve those behind it, and what is urgent waits for at most
one claim in so many.
"""

from __future__ import annotations


class Turns:
    """The turns of one plane; `every` 0 keeps the order of the request always."""

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._claims: dict[tuple[str, ...], int] = {}

    def order(self, streams: tuple[str, ...]) -> tuple[str, ...]:
        """The streams in the order in which this claim asks them.

        >>> turns = Turns(8)
        >>> [turns.order(("high", "low"))[0] for _ in range(9)][6:]
        ['high', 'low', 'high']
        """
        every = self._every
        if not every or len(streams) < 2:
            return streams
        number = self._claims.get(streams, 0) + 1
        self._claims[streams] = number
        if number % every:
            return streams
        first = 1 + (number // every - 1) % (len(streams) - 1)
        return (streams[first], *streams[:first], *streams[first + 1 :])
