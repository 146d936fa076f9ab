"""Every knob of the transcoder, in one frozen value."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodeSettings:
    """Limits and places.

    A source over `doubling_from_bytes` may at most double: the 200 % rule of section 11. Below it
    an output may have `output_bytes_max`. `local_root` is the one folder from which `file://`
    sources may be read and to which outputs may be written; None means nowhere.
    At most `parallel` ffmpegs run at once, however many attempts a worker holds.
    `required` names the parts of the cage (network, files, syscalls) without which ffmpeg does not
    run at all; `readable` are further places that it may read, for libraries in unusual ones.
    """

    work_folder: Path = field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"tenure-{os.geteuid()}"
    )
    source_bytes_max: int = 20 * GIB
    output_bytes_max: int = 4 * GIB
    doubling_from_bytes: int = 10**9
    disk_reserve_bytes: int = GIB // 4
    memory_bytes_max: int = 4 * GIB
    cpu_s_max: int = 4 * 3600
    wall_s_max: float = 4 * 3600.0
    threads: int = 2
    threads_max: int = 1024
    parallel: int = field(default_factory=lambda: os.cpu_count() or 1)
    transfer_s_max: float = 3600.0
    report_every_s: float = 1.0
    local_root: Path | None = None
    ffmpeg: Path | None = None
    required: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def output_cap_bytes(self, source_bytes: int) -> int:
        """How large each output of this source may become."""
        if source_bytes > self.doubling_from_bytes:
            return 2 * source_bytes
        return self.output_bytes_max

    def disk_needed_bytes(self, source_bytes: int, outputs: int) -> int:
        """What must be free before the work begins: the copy, and outputs of twice its size."""
        return source_bytes * (1 + 2 * outputs) + self.disk_reserve_bytes
