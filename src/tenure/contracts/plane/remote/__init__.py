"""A plane at `plane+http://host:8470`, as its workers and clients use it."""
