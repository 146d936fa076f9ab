"""Job ids: valid version 7 UUIDs, in the order of their making."""

from uuid import UUID

from tenure.sql.submit import uuid7


def test_an_id_is_a_uuid_of_version_seven_and_later_ones_are_greater() -> None:
    ids = [uuid7() for _ in range(1_000)]
    assert len(set(ids)) == 1_000
    assert all(str(UUID(text)) == text and UUID(text).version == 7 for text in ids)
    assert all(UUID(text).variant == "specified in RFC 4122" for text in ids)
    stamps = [UUID(text).int >> 80 for text in ids]
    assert stamps == sorted(stamps)
