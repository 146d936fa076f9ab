"""The plane of the contract's own tests, for foreign workers."""

from tests.contract.plane.conftest import redis_options, site

__all__ = ["redis_options", "site"]
