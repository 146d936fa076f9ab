"""Contracts and queue URLs.

A queue is a URL: `streams+redis://host:6379/0?lease_ms=15000`, or its name in tenure.toml. The word
before the first `+` (or before `://`) names the contract, the rest is the store's address. A
contract of ours is a folder under `tenure.contracts` whose `CONTRACT` describes it. One in a
package of its own is an entry point of the group `tenure.contracts` that names a
`Contract`. Nothing else registers a contract.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from tenure.core.errors import UnknownContract, UsageError
from tenure.core.journal import JournalFormat
from tenure.core.lease import WorkerId
from tenure.core.seam import Journal, Ledger, Queue
from tenure.core.state import Kind, Machine

if TYPE_CHECKING:
    from tenure.core.endpoint import Endpoint

Options = TypeVar("Options", bound=msgspec.Struct)

_NUMBER_MAX = 2**53
_GROUP = "tenure.contracts"
_SECRET = frozenset({"password", "sslpassword", "sentinel_password", "password_command"})


class QueueUrl(msgspec.Struct, frozen=True):
    """A parsed queue URL: the contract's name, the store's own URL without options, the options."""

    contract: str
    store: str
    options: dict[str, str]
    text: str

    def read(
        self, options: type[Options], *, of_store: Collection[str] = ()
    ) -> tuple[Options, str]:
        """The contract's options, typed, and the store's URL with the other parameters.

        Those named in `of_store` are no misspelt options of the contract.
        """
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
        for key in rest.keys() - set(of_store):
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
        """The name of the queue: its contract, and the option that names it, if any.

        >>> parse_url("bullmq+redis://h/0?queue=mail").name, parse_url("memory://a").name
        ('bullmq:mail', 'memory')
        """
        own = [self.options[key] for key in ("queue", "box") if self.options.get(key)]
        return ":".join([self.contract, *own])

    def with_options(self, options: Mapping[str, str]) -> str:
        """The text of the URL with these options instead of its own."""
        query = f"?{urlencode(options)}" if options else ""
        return self.text.partition("?")[0] + query

    @property
    def safe(self) -> str:
        """The URL without its password, for messages and logs."""
        return _masked(self.text)

    def __repr__(self) -> str:
        return f"QueueUrl({self.safe!r})"


def _masked(url: str) -> str:
    """A URL without passwords, also in its options, which may hold a URL."""
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


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, numbered where several queues have the same.

    >>> unique_names(["streams", "plane", "streams"])
    ['streams', 'plane', 'streams~2']
    """
    earlier = (list(names[:at]).count(name) for at, name in enumerate(names))
    return [f"{name}~{n + 1}" if n else name for name, n in zip(names, earlier, strict=True)]


def check_least(options: msgspec.Struct, contract: str, **least: int) -> None:
    """Raise `UsageError` for an option below its lowest value."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value < lowest:
            raise UsageError(f"{name} is {value}; it must be at least {lowest}", contract=contract)


def parse_url(text: str) -> QueueUrl:
    """Split a queue URL, or that of the queue that tenure.toml has under this name.

    Raises `UsageError` for anything else.
    """
    if text.find("://") <= 0:
        from tenure.core.config import queue_url

        text = queue_url(text)
    scheme, _, _ = text.partition("://")
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


class Finding(msgspec.Struct, frozen=True):
    """What one check of `tenure doctor` found: `problem` will hurt, `note` may; `remedy` helps."""

    level: Literal["ok", "note", "problem"]
    check: str
    detail: str
    remedy: str = ""


def make_finding(
    check: str,
    detail: str,
    *,
    bad: bool,
    remedy: str,
    level: Literal["note", "problem"] = "problem",
) -> Finding:
    """A finding of `level` with its remedy if it is bad, else ok."""
    return Finding(level, check, detail, remedy) if bad else Finding("ok", check, detail)


def paused_finding(paused: bool, remedy: str) -> Finding:
    """Whether a queue hands out jobs."""
    detail = "paused" if paused else "handing out jobs"
    return make_finding("pause", detail, bad=paused, level="note", remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """All that the rest of the product knows about a contract: its folder declares one.

    Loading a descriptor must be cheap, so its functions import what they need when called.

    machine          its states and steps
    open_*           the three sides of the seam behind a URL; they connect on first use
    read_options     the typed options of a URL, and the store's URL without them
    journal_format   how the journal is written, for readers in bulk; None: only through the seam
    journals         the URLs of the queues that this one consists of, each with a journal; or none
    parts            what only some contracts have, by name: see `open_part`
    routes           its HTTP endpoints: `(submits, ledger, queue, *, ttl_s, redaction, **options)`
    samples          the sample queues of `tenure up`, as `tenure.samples.SampleFlow`s
    doctor           checks of `tenure doctor` beyond those of the store: `(url, connection)`
    example_url      a URL of its own, to show
    submit_example   title and template of a submit with the contract's own client, for people
    kinds            kinds of states and job events that are not states of `machine`
    lost_max_option  the URL option that limits how often a lease may be lost
    named_by_host    workers are known to it by the name of their host alone
    foreign_writers  programs that write no journal may work on its queues
    is_fifo          what was submitted first is claimed first
    is_timed         a position in the journal holds the store's own time
    submit_options   which of `priority`, `group`, `ttl_s` and `unique` its jobs can have
    unique_option    its own job options for `unique`
    has_flows        its jobs can be chained and gathered
    """

    machine: Machine
    open_queue: Callable[[QueueUrl, str], Queue]
    open_ledger: Callable[[QueueUrl], Ledger]
    open_journal: Callable[[QueueUrl], Journal]
    read_options: Callable[[QueueUrl], tuple[Any, str]]
    example_url: str
    journal_format: Callable[[QueueUrl], JournalFormat | None] | None = None
    journals: Callable[[QueueUrl], Sequence[str]] | None = None
    parts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    routes: Callable[..., list[Endpoint]] | None = None
    samples: Callable[[], Sequence[Any]] | None = None
    doctor: Callable[[QueueUrl, Any], Awaitable[list[Finding]]] | None = None
    submit_example: tuple[str, str] | None = None
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    lost_max_option: str = ""
    named_by_host: bool = False
    foreign_writers: bool = False
    is_fifo: bool = False
    is_timed: bool = False
    submit_options: frozenset[str] = frozenset()
    unique_option: Callable[[str], dict[str, Any]] | None = None
    has_flows: bool = True

    @property
    def name(self) -> str:
        """The word before `+` in its URLs."""
        return self.machine.contract


def contract_names() -> list[str]:
    """The contracts that can be opened here."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    package = importlib.import_module(_GROUP)
    folders = [module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg]
    return sorted({*folders, *(point.name for point in entry_points(group=_GROUP))})


def contracts() -> dict[str, Contract]:
    """The descriptors of all contracts that can be opened here, by name."""
    found = {name: find_contract(name) for name in contract_names()}
    return {name: contract for name, contract in found.items() if contract is not None}


def machines() -> dict[str, Machine]:
    """The state machines of all contracts, by name."""
    return {name: contract.machine for name, contract in contracts().items()}


def find_contract(name: str) -> Contract | None:
    """The descriptor of a contract, None if there is none of this name."""
    if name.isidentifier() and importlib.util.find_spec(f"{_GROUP}.{name}") is not None:
        found: Contract = importlib.import_module(f"{_GROUP}.{name}").CONTRACT
        return found
    from importlib.metadata import entry_points

    for point in entry_points(group=_GROUP, name=name):
        named: Contract = point.load()
        return named
    return None


def contract_of(url: str | QueueUrl) -> Contract:
    """The descriptor of the contract that a URL names."""
    parsed = parse_url(url) if isinstance(url, str) else url
    found = find_contract(parsed.contract)
    if found is None:
        name, known = parsed.contract, contract_names()
        import difflib

        close = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise UnknownContract(
            f"queue URL {parsed.safe}: there is no contract {name!r}{hint} "
            f"(there are: {', '.join(known)})"
        )
    return found


def open_queue(url: str, *, worker_id: str = "") -> Queue:
    """The queue behind a URL. It connects on first use; `worker_id` names the claimer."""
    parsed = parse_url(url)
    contract = contract_of(parsed)
    if isinstance(worker_id, WorkerId):
        worker_id = worker_id.name if contract.named_by_host else str(worker_id)
    return contract.open_queue(parsed, worker_id)


def open_ledger(url: str) -> Ledger:
    """The reading and steering side of the queue behind a URL."""
    parsed = parse_url(url)
    return contract_of(parsed).open_ledger(parsed)


def open_journal(url: str) -> Journal:
    """The history of the queue behind a URL."""
    parsed = parse_url(url)
    return contract_of(parsed).open_journal(parsed)


def open_part(url: str, part: str, **given: Any) -> Any:
    """A part that only some contracts have, by its name in `Contract.parts`.

    There are `database`, `box`, `outbox`, `credentials`, `endpoint_secrets` and `news`, which names
    the jobs that changed where the journal does not name all of them. `given` is for the part.
    """
    parsed = parse_url(url)
    opener = contract_of(parsed).parts.get(part)
    if opener is None:
        raise UsageError(
            f"queue URL {parsed.safe}: the contract {parsed.contract!r} keeps no "
            f"{part.replace('_', ' ')}",
            contract=parsed.contract,
        )
    return opener(parsed, **given)


def has_part(url: str, part: str) -> bool:
    """Whether the contract of this URL has such a part."""
    return part in contract_of(url).parts


def journal_format(url: str) -> JournalFormat | None:
    """How the journal behind a URL is written, for readers in bulk; None if not declared."""
    parsed = parse_url(url)
    declare = contract_of(parsed).journal_format
    return declare(parsed) if declare else None


def journal_urls(url: str) -> list[str]:
    """The URLs of the queues whose journals hold the history of a queue: mostly its own."""
    parsed = parse_url(url)
    journals = contract_of(parsed).journals
    return list(journals(parsed) if journals else ()) or [url]
