"""How long each fuzzer runs, how hard, and from which seed: bin/fuzz sets these."""

import os

_ASKED_S = os.environ.get("TENURE_FUZZ_S")
SECONDS = int(_ASKED_S or 60)
SEED = int(os.environ.get("TENURE_FUZZ_SEED") or 11)
# A fuzzer at full speed keeps a core from the tests beside it. In bin/test it rests for three times
# as long as it works; for bin/fuzz, which runs nothing else, it works all the time.
REST = 0 if _ASKED_S else 3
# Starting, ending and judging come on top.
TIMEOUT_S = SECONDS * 1.5 + 240
