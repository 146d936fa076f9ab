"""The plane of the contract's own tests, for foreign workers."""

from tests.contract.plane.conftest import site

__all__ = ["site"]
