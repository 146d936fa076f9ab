"""What a contract says about its journal to readers in bulk: where it lies and how it is written.

`Journal` of the seam reads every history, one event object at a time. A contract whose journal has
a plain physical form may also declare it, by `journal_tape(url)` beside its `open_journal`; the
pipeline then reads ranges of it side by side, straight into columns. A contract that declares
nothing is read through the seam.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class StreamTape(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis stream of packed lines.

    An entry's every second value is a line: parts in the order of `fields`, joined by tabs and cut
    off after the last that applies. The last field may itself hold tabs. `captured` names a hash
    and a field: capture leaves there how far it has come, and the contract trims only behind it.
    """

    store: str
    key: str
    contract: str
    queue: str
    fields: tuple[str, ...]
    captured: tuple[str, str] = ("", "")


class SqlTape(msgspec.Struct, frozen=True, kw_only=True):
    """A table of an SQL store, one event a row.

    `columns` maps the journal's field names to SQL expressions; a field that is not named has its
    default. `seq` is the table's rising number. Where transactions run side by side, `xid` is the
    column with the writer's transaction id (`xid8 default pg_current_xact_id()`): rows are then
    read behind the oldest open transaction, in the order (xid, seq), so that none is passed over.
    `where` narrows the table to one queue.
    """

    store: str
    table: str
    contract: str
    queue: str
    columns: dict[str, str]
    seq: str = "seq"
    xid: str = ""
    where: str = ""


Tape: TypeAlias = StreamTape | SqlTape
