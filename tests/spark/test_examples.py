"""The worked example: a corpus becomes vectors."""

from __future__ import annotations

import runpy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "fox": "The quick brown fox jumps over the lazy dog",
    "dog": "A lazy brown dog sleeps; the fox jumps over it",
    "tax": "Quarterly figures were published on Monday",
    "no": "...",
}


def test_a_corpus_is_embedded_and_what_cannot_be_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    source, target = str(tmp_path / "corpus.parquet"), str(tmp_path / "vectors.parquet")
    pq.write_table(pa.table({"id": list(TEXTS), "text": list(TEXTS.values())}), source)
    example = runpy.run_path(str(ROOT / "examples" / "embed_corpus.py"))
    failed = example["embed_file"](spark, source, target)
    assert list(failed) == ["no"]
    assert "there is no word in it" in failed["no"]
    rows = pq.read_table(target).to_pylist()
    found = {row["id"]: row["vector"] for row in rows}
    assert set(found) == {"fox", "dog", "tax"}
    assert len(found["fox"]) == example["DIMENSIONS"]

    def near(one: str, other: str) -> float:
        return sum(x * y for x, y in zip(found[one], found[other], strict=True))

    assert near("fox", "dog") > 0.5 > near("fox", "tax")
