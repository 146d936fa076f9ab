"""How long each fuzzer runs, and from which seed: bin/fuzz sets both."""

import os

SECONDS = int(os.environ.get("TENURE_FUZZ_S") or 60)
SEED = int(os.environ.get("TENURE_FUZZ_SEED") or 11)
# Starting, ending and judging come on top.
TIMEOUT_S = SECONDS * 1.5 + 240
