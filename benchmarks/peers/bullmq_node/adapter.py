"""BullMQ itself, in Node: this file brings its packages and hands over to adapter.cjs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Native extras are left out, as in most containers; they make no difference to these figures.
INSTALL = ("npm", "install", "--omit=optional", "--no-audit", "--no-fund", "--ignore-scripts")

if not (HERE / "node_modules" / "bullmq").exists():
    subprocess.run(INSTALL, cwd=HERE, check=True, stdout=sys.stderr)
os.execvp("node", ["node", "adapter.cjs"])
