"""Bytes that parsers have stumbled over, and bytes at random."""

from random import Random

PIECES = (
    b"", b"0", b"-1", b"1e400", b"9" * 400, b"9" * 5_000, b"NaN", b"null", b"[[[[", b"{", b"%",
    b"%ff", b"%00", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"..", b"/../", b"//",
    b'"', b'"\\', b"a=b; c", b"tenure_session=", b"tenure_session=1.9999999999.aa", b"=",
    b"tenure_session=1." + b"9" * 5_000 + b".aa", b"tenure_session=\xe9.\xe9", b";", b",",
    b"a&" * 900, b"Bearer ", b"Basic !!!", b"Bearer \xff", b"x" * 9_000, b"chunked", b"gzip",
    b"multipart/form-data; boundary=", b"application/json; charset=utf-7", b"<script>", b"${jndi:}",
    b"2026-13-45T99:99:99Z", b"* * * * *", b"127.0.0.1", b"::1", b"file:///etc/passwd", b'W/"x"',
)  # fmt: skip


def junk(rng: Random) -> bytes:
    """One piece mostly, sometimes two, sometimes noise."""
    if rng.random() < 0.15:
        return rng.randbytes(rng.randint(0, 60))
    return rng.choice(PIECES) + (rng.choice(PIECES) if rng.random() < 0.2 else b"")
