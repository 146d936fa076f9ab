"""Tenure's inbox on PostgreSQL with a webhook for every job: each step leaves its outbox row."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ["BENCH_EVENTS"] = "1"
PLAIN = Path(__file__).resolve().parents[1] / "tenure_inbox" / "adapter.py"
runpy.run_path(str(PLAIN), run_name="__main__")
