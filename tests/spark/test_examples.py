"""The worked examples: a corpus becomes vectors, and a notebook draws a chart of a history."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from tests.spark.typing_commands import Step, typed
from tests.spark.working import work

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


def cells() -> list[Step]:
    """The cells of the notebook: a line with `!` is a command, all else is Python."""
    notebook = json.loads((ROOT / "examples" / "pipeline.ipynb").read_text())
    sources = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    return [
        shlex.split(source.removeprefix("!tenure pipeline ")) if source[0] == "!" else source
        for source in sources
    ]


async def test_the_notebook_goes_from_a_queue_to_a_chart(tmp_path: Path, streams_url: str) -> None:
    await work(streams_url, 12, fail_every=6)
    shown = typed(tmp_path, *cells(), "print(chart)", environment={"TENURE_QUEUE_URL": streams_url})
    assert [code for code, _ in shown] == [0] * len(shown)
    said = "".join(output for _, output in shown)
    assert "streams|error|   2" in said.replace(" |", "|")
    assert "| I7" in said.replace("|I7", "| I7")
    assert "sound" in said
    assert shown[-1][1].startswith("<svg")
    assert "10 jobs" in shown[-1][1]
