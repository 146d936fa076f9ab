"""The AsyncAPI document: valid by AsyncAPI's own schema, current, and true of what is sent.

The schema is that of github.com/asyncapi/spec-json-schemas (Apache-2.0), packed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tenure.cli.project import described
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import Web

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(
    gzip.decompress(Path(__file__).with_name("asyncapi-3.0.0.json.gz").read_bytes())
)
DOCUMENT = json.loads(described("asyncapi"))


def fits(shape: str, value: Any) -> None:
    """The value is what the document says of messages of this shape."""
    schema = {"$ref": f"#/components/schemas/{shape}", "components": DOCUMENT["components"]}
    jsonschema_rs.validator_for(schema).validate(value)


@pytest.mark.parametrize("which", ["openapi", "asyncapi"])
def test_the_committed_documents_are_those_of_this_version(which: str) -> None:
    committed = (ROOT / "docs" / "reference" / f"{which}.json").read_text()
    assert json.loads(committed) == json.loads(described(which)), (
        f"run: tenure api {which} > docs/reference/{which}.json"
    )


def test_the_document_is_valid_by_the_schema_of_asyncapi() -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    validator.validate(DOCUMENT)
    wrong = DOCUMENT | {"operations": {"followJob": {"action": "shout"}}}
    assert not validator.is_valid(wrong)


def test_every_reference_of_the_document_leads_to_something() -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            mine = [value["$ref"]] if "$ref" in value else []
            return mine + [ref for each in value.values() for ref in references(each)]
        return (
            [ref for each in value for ref in references(each)] if isinstance(value, list) else []
        )

    found = references(DOCUMENT)
    assert len(found) > 10
    for reference in found:
        place: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


async def test_a_gateway_serves_the_document_of_what_it_has(site: Site, web: Web) -> None:
    reply = await web.get("/asyncapi.json")
    assert reply.status == 200
    assert set(reply.json["channels"]) == {"followJob", "live", "webhook"}
    for name, channel in reply.json["channels"].items():
        assert channel == DOCUMENT["channels"][name]


async def test_the_frames_of_a_job_are_as_described(site: Site, web: Web) -> None:
    job_id = await web.submit()
    following = await web.follow(job_id)
    lease = await site.claim()
    await site.tell(lease, "half", b'{"pct":50}')
    await site.finish(lease)
    hello, *events = await following.all()
    fits("Hello", hello.json)
    for event in events:
        fits("JobNews", event.json)
    with pytest.raises(jsonschema_rs.ValidationError):
        fits("JobNews", {"type": "done"})


async def test_the_pulse_of_the_pages_is_as_described(site: Site, web: Web) -> None:
    following = await web.stream("/live")
    job_id = await web.submit()
    seen: list[str] = []
    async for event in following:
        seen += [event.name]
        fits(event.name.capitalize(), event.json)
        if event.name == "tick" and ["streams", job_id] in event.json["moved"]:
            break
    following.close()
    assert seen[0] == "series"
