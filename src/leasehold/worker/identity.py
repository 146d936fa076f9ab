"""Who this worker is: the host's name joined with a boot id that no other process ever had.

The name alone is not enough: a pod of a StatefulSet comes back under the same name, and must not
be taken for the one that died. Fencing never relies on it; it is for people and for consumer names.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping


def boot_id() -> str:
    """Twelve random hexadecimal digits, new at every call."""
    return uuid.uuid4().hex[:12]


def identity(environ: Mapping[str, str] | None = None, *, boot: str = "") -> str:
    """`POD_NAME`, else `HOSTNAME`, else the host's own name, joined with the boot id.

    >>> identity({"POD_NAME": "render-0", "HOSTNAME": "node7"}, boot="5d1c")
    'render-0-5d1c'
    """
    known = environ or {}
    name = known.get("POD_NAME") or known.get("HOSTNAME") or socket.gethostname()
    return f"{name}-{boot or boot_id()}"
