"""Who this worker is: the host's name joined with a boot id that no other process ever had.

The name alone is not enough for most contracts: a pod of a StatefulSet comes back under the same
name, and must not be taken for the one that died. Fencing never relies on it; it is for people and
for consumer names. The inbox shows the name alone, which is POD_NAME, else HOSTNAME, else the boot
UUID.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping

from tenure.core.identity import WorkerId


def identity(environ: Mapping[str, str] | None = None, *, boot: str = "") -> WorkerId:
    """`POD_NAME`, else `HOSTNAME`, else the host's own name, joined with the boot id.

    >>> identity({"POD_NAME": "render-0", "HOSTNAME": "node7"}, boot="5d1c")
    'render-0-5d1c'
    >>> identity({"HOSTNAME": "node7"}).name, identity({}, boot="5d1c").name
    ('node7', '5d1c')
    """
    known = environ or {}
    name = known.get("POD_NAME") or known.get("HOSTNAME") or ""
    boot_uuid = uuid.uuid4()
    unique = f"{name or socket.gethostname()}-{boot or boot_uuid.hex[:12]}"
    return WorkerId(unique, name or boot or str(boot_uuid))
