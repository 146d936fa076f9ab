"""The id of a worker: a name for people, joined with the boot that no other process has."""

from __future__ import annotations


class WorkerId(str):
    """The id of a worker, unlike that of every other process. `name` is its part for people.

    Most contracts need an id of their own for every process. The inbox asks for the name of the pod
    or host as it is, and fences its writes by other means.
    """

    __slots__ = ("name",)

    name: str

    def __new__(cls, unique: str, name: str = "") -> WorkerId:
        made = super().__new__(cls, unique)
        made.name = name or unique
        return made
