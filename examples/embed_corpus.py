"""Vectors for every text of a corpus, by the task that a worker would run. Run it:

python examples/embed_corpus.py corpus.parquet vectors.parquet

The corpus has the columns `id` and `text`. Each row is a job: what fails in passing is tried again,
what cannot be done is told with its reason, and the rest is written. The same `embed` serves a
queue: `tenure worker examples/embed_corpus.py`.
"""

import hashlib
import math
import re
import sys
from typing import Any

from tenure import Fatal, Job, exponential, task

DIMENSIONS = 256


@task("embed", retry=exponential(200, max_attempts=3), timeout_s=60)
def embed(job: Job) -> list[float]:
    """One text becomes one vector."""
    words = re.findall(r"\w+", job.payload["text"].lower())
    if not words:
        raise Fatal("there is no word in it")
    return vector(words)


def vector(words: list[str]) -> list[float]:
    """Each word counts in one dimension, for or against, by its hash; of length one.

    It needs no model and knows nothing of meaning: texts are near that share words. A model goes
    here: load it once, at the first text, and keep it in the module.
    """
    sums = [0.0] * DIMENSIONS
    for word in words:
        number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
        sums[number % DIMENSIONS] += 1.0 if number >> 63 else -1.0
    length = math.sqrt(sum(x * x for x in sums)) or 1.0
    return [x / length for x in sums]


def embed_file(spark: Any, source: str, target: str) -> dict[str, str]:
    """Write the vectors beside their ids; the reasons of those that have none, by id."""
    from tenure.pipeline import run_task

    corpus = spark.read.parquet(source).select("id", "text")
    done = run_task(corpus, embed, key="id").cache()
    vectors = done.where("state = 'done'").selectExpr(
        "id", "from_json(result, 'array<float>') AS vector"
    )
    vectors.write.mode("overwrite").parquet(target)
    return {row.id: row.error for row in done.where("state <> 'done'").collect()}


if __name__ == "__main__":
    from tenure.pipeline import SparkSettings, open_session

    failed = embed_file(open_session(SparkSettings()), *sys.argv[1:3])
    for key, reason in failed.items():
        print(f"{key}: {reason}", file=sys.stderr)
