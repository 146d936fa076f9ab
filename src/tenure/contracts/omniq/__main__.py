"""Write the scripts of the official SDKs into a folder: see `sdk`."""

from __future__ import annotations

import sys
from pathlib import Path

from tenure.contracts.omniq.sdk import write_scripts

if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tenure.contracts.omniq FOLDER")
    write_scripts(Path(sys.argv[1]))
