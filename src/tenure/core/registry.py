"""A queue is a URL: `streams+redis://host:6379/0?lease_ms=15000`.

The word before the first `+` (or before `://`) names the contract, the rest is the store's address.
A contract is found by its folder under `tenure.contracts`, or by an entry point of the group
`tenure.contracts` for one that lives elsewhere; nothing is registered anywhere else.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from tenure.core.errors import UnknownContract, UsageError
from tenure.core.journal import JournalFormat
from tenure.core.lease import WorkerId
from tenure.core.seam import Journal, Ledger, Queue

Options = TypeVar("Options", bound=msgspec.Struct)

_NUMBER_MAX = 2**53
_GROUP = "tenure.contracts"
_SECRET = frozenset({"password", "sslpassword"})


class QueueUrl(msgspec.Struct, frozen=True):
    """A parsed queue URL: the contract's name, the store's own URL without options, the options."""

    contract: str
    store: str
    options: dict[str, str]
    text: str

    def read(self, options: type[Options]) -> tuple[Options, str]:
        """The contract's options, typed, and the store URL with the parameters it left over."""
        fields = msgspec.structs.fields(options)
        known = {field.encode_name for field in fields}
        mine = {key: value for key, value in self.options.items() if key in known}
        rest = {key: value for key, value in self.options.items() if key not in known}
        lacking = [field.encode_name for field in fields if field.required]
        if lacking := [name for name in lacking if name not in mine]:
            raise UsageError(
                f"queue URL {self.safe}: it does not say the {lacking[0]}; add "
                f"{'&' if self.options else '?'}{lacking[0]}=NAME",
                contract=self.contract,
            )
        try:
            read = msgspec.convert(mine, options, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"queue URL {self.safe}: {error}", contract=self.contract) from None
        for name, value in msgspec.structs.asdict(read).items():
            if isinstance(value, int | float) and not abs(value) <= _NUMBER_MAX:
                raise UsageError(
                    f"queue URL {self.safe}: {name} is a number up to {_NUMBER_MAX}",
                    contract=self.contract,
                )
        for key in rest:
            import difflib

            close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
            if close:
                raise UsageError(
                    f"queue URL {self.safe}: unknown option {key!r}, did you mean {close[0]!r}?",
                    contract=self.contract,
                )
        query = f"?{urlencode(rest)}" if rest else ""
        return read, self.store + query

    @property
    def name(self) -> str:
        """What the queue is called: its contract, and what tells it from others of the same.

        >>> parse_url("bullmq+redis://h/0?queue=mail").name, parse_url("memory://a").name
        ('bullmq:mail', 'memory')
        """
        own = [self.options[key] for key in ("queue", "box") if self.options.get(key)]
        return ":".join([self.contract, *own])

    @property
    def safe(self) -> str:
        """The URL without its password, for messages and logs."""
        return _masked(self.text)

    def __repr__(self) -> str:
        return f"QueueUrl({self.safe!r})"


def _masked(url: str) -> str:
    """A URL without passwords: its own, and those in its options, one of which may be a URL."""
    address, mark, query = url.partition("?")
    before, at, host = address.rpartition("@")
    scheme, _, login = before.partition("://")
    user, colon, _ = login.partition(":")
    if colon:
        address = f"{scheme}://{user}:***{at}{host}"
    return address + mark + "&".join(map(_masked_option, query.split("&")))


def _masked_option(option: str) -> str:
    name, _, value = option.partition("=")
    if unquote(name).lower() in _SECRET:
        return f"{name}=***"
    plain = unquote(value)
    masked = _masked(plain) if "://" in plain else plain
    return option if masked == plain else f"{name}={masked}"


def check_least(options: msgspec.Struct, contract: str, **least: int) -> None:
    """Refuse options whose numbers are less than these."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value < lowest:
            raise UsageError(f"{name} is {value}; it must be at least {lowest}", contract=contract)


def parse_url(text: str) -> QueueUrl:
    """Split a queue URL; raises `UsageError` with an example when it is none."""
    scheme, separator, _ = text.partition("://")
    if not separator or not scheme:
        raise UsageError(
            f"{text!r} is not a queue URL; one looks like streams+redis://localhost:6379/0"
        )
    contract, _, store_scheme = scheme.partition("+")
    try:
        parts = urlsplit(text)
    except ValueError:  # its text may repeat the password
        raise UsageError(
            f"queue URL {_masked(text)!r} cannot be read; special characters in a user name, "
            "password or host are percent-encoded, such as %5B for ["
        ) from None
    store = urlunsplit((store_scheme, parts.netloc, parts.path, "", "")) if store_scheme else ""
    if store_scheme and not parts.netloc:  # urlunsplit drops the empty host of unix:///path
        store = f"{store_scheme}://{parts.path}"
    return QueueUrl(contract, store, dict(parse_qsl(parts.query)), text)


def contract_names() -> list[str]:
    """The contracts that can be opened here."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    package = importlib.import_module(_GROUP)
    folders = [module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg]
    return sorted({*folders, *(point.name for point in entry_points(group=_GROUP))})


def open_queue(url: str, *, worker_id: str = "") -> Queue:
    """The queue behind a URL. It connects on first use; `worker_id` names the claimer."""
    parsed = parse_url(url)
    contract = _contract(parsed)
    if isinstance(worker_id, WorkerId):
        by_host = getattr(contract, "NAMED_BY_HOST", False)
        worker_id = worker_id.name if by_host else str(worker_id)
    return cast("Queue", contract.open_queue(parsed, worker_id=worker_id))


def open_ledger(url: str) -> Ledger:
    """The reading and steering side of the queue behind a URL."""
    parsed = parse_url(url)
    return cast("Ledger", _contract(parsed).open_ledger(parsed))


def open_journal(url: str) -> Journal:
    """The history of the queue behind a URL."""
    parsed = parse_url(url)
    return cast("Journal", _contract(parsed).open_journal(parsed))


def open_part(url: str, part: str, **given: Any) -> Any:
    """What only some contracts have: `box`, `credentials`, `endpoint_secrets`, `outbox`.

    `given` is for the part.
    """
    parsed = parse_url(url)
    opener = getattr(_contract(parsed), f"open_{part}", None)
    if opener is None:
        raise UsageError(
            f"queue URL {parsed.safe}: the contract {parsed.contract!r} keeps no "
            f"{part.replace('_', ' ')}",
            contract=parsed.contract,
        )
    return opener(parsed, **given)


def has_part(url: str, part: str) -> bool:
    """Whether the contract of this URL has such a part."""
    return hasattr(_contract(parse_url(url)), f"open_{part}")


def journal_format(url: str) -> JournalFormat | None:
    """How the journal behind a URL is written, for readers in bulk; None if not declared."""
    parsed = parse_url(url)
    declare = getattr(_contract(parsed), "journal_format", None)
    return cast("JournalFormat", declare(parsed)) if declare else None


def _contract(url: QueueUrl) -> Any:
    name = url.contract
    if name.isidentifier() and importlib.util.find_spec(f"{_GROUP}.{name}") is not None:
        return importlib.import_module(f"{_GROUP}.{name}")
    from importlib.metadata import entry_points

    for point in entry_points(group=_GROUP, name=name):
        return point.load()
    import difflib

    known = contract_names()
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise UnknownContract(
        f"queue URL {url.safe}: there is no contract {name!r}{hint} (there are: {', '.join(known)})"
    )
