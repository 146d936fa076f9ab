"""Prints the software bill of materials, as CycloneDX JSON: `python bin/sbom.py /path/to/uv`.

uv writes the locked packages of every extra; the scripts that the wheel holds as copies are added
from the table in VENDORED.md.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENDORED = ROOT / "src" / "tenure" / "dashboard" / "static" / "VENDORED.md"
# | htmx.js | htmx.org 4.0.0, dist/htmx.min.js | 0BSD | e484d917... |
ROW = re.compile(r"\| (\S+) \| (\S+) (\S+), \S+ \| (\w+)[^|]* \| ([0-9a-f]{64}) \|")


def locked(uv: str) -> dict[str, Any]:
    """What uv.lock holds for users: all extras and no tools of development."""
    command = [uv, "export", "--quiet", "--frozen", "--no-dev", "--all-extras"]
    command += ["--preview-features", "sbom-export", "--format", "cyclonedx1.5"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)  # nosec B603 # uv
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def vendored() -> list[dict[str, Any]]:
    """Every copied file as a component of its own: its hash is that of the file in the wheel."""
    return [
        {
            "type": "file",
            "bom-ref": f"vendored/{file}",
            "name": file,
            "version": version,
            "purl": f"pkg:npm/{package.lower()}@{version}",
            "licenses": [{"license": {"id": licence}}],
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for file, package, version, licence, digest in ROW.findall(VENDORED.read_text())
    ]


if __name__ == "__main__":
    bill = locked(sys.argv[1])
    bill["components"] += vendored()
    print(json.dumps(bill, indent=2))
