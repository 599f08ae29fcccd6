"""Authentication of both sides: channels and ports with mutual TLS, and the party of every call.

A certificate identifies a party. Servers are identified by their role and not by their host, so an edge server may
move, and only a holder of its certificate can take its place. Without certificates, connections are plain text, on this
machine only, and callers are not authenticated; that is for trials.
"""

import ipaddress
import os
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast, get_args

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from adaptsfl.checks import short
from adaptsfl.deploy.security.certs import SCHEME, SERVERS, is_device_name, server_host
from adaptsfl.errors import InvalidInput

Role = Literal["device", "edge", "fed"]
Options = Sequence[tuple[str, Any]]

PARTY_METADATA = "adaptsfl-party"

# Routers forget connections on which nothing is sent, some after a minute, and a device may wait longer for its turn.
# Pings keep them open and detect a lost connection within 50 seconds; on a slow link they queue behind data, so the
# timeout of an answer is 20 seconds.
_KEEPALIVE: Options = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)
# A server must be created with grpc.aio.server(options=SERVER_OPTIONS).
SERVER_OPTIONS: Options = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # else it disconnects clients that ping as above
    ("grpc.so_reuseport", 0),  # else two servers can share a port, and each gets some of the calls
)


class CredentialsWarning(UserWarning):
    """Credentials work, but other users of this machine can read the key."""


@dataclass(frozen=True)
class Party:
    """A participant's role and name; there is one server of each role, and its name is its role."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


@dataclass(frozen=True)
class Credentials:
    """A party's certificate and key, and the authority that it trusts, all as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes
    party: Party

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"Credentials({self.party})"


def load_credentials(folder: Path, name: str) -> Credentials:
    """Read and validate ca.pem, NAME.pem and NAME.key, so that errors do not first show in a failed handshake."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InvalidInput(str(folder), "is no folder", "Give the one with ca.pem and this party's certificate and key")
    ca_place, place, key_place = (folder / file for file in ("ca.pem", f"{name}.pem", f"{name}.key"))
    ca_pem, pem, key_pem = (_read(path) for path in (ca_place, place, key_place))
    certificate = _certificates(place, pem)[0]
    party = _party_of(place, certificate)
    renew = f"Where ca.key is, run adaptsfl certs FOLDER --renew {party.name}, and copy both files here"
    if party.name != name:
        raise InvalidInput(str(place), f"is the certificate of {party}", f"Copy {name}.pem and {name}.key here again")
    _check_key(key_place, key_pem, certificate)
    issuer = next((ca for ca in _certificates(ca_place, ca_pem) if _issued(ca, certificate)), None)
    if issuer is None:
        remedy = f"Copy ca.pem, {name}.pem and {name}.key from one and the same folder"
        raise InvalidInput(str(place), "is not signed by ca.pem", remedy)
    _check_time(place, certificate, renew)
    _check_time(ca_place, issuer, "Make a new authority, and with it new certificates for all, in an empty folder")
    return Credentials(ca_pem, pem, key_pem, party)


def open_channel(
    address: str,
    role: Literal["edge", "fed"],
    credentials: Credentials | None,
    party: Party | None = None,
    options: Options = (),
) -> grpc.aio.Channel:
    """Return a channel to the server with the certificate of `role`, at HOST:PORT or unix:PATH.

    Without credentials it is plain text and to this machine only; every call then names `party` as its caller.
    With them the certificate identifies the caller, and `party` is ignored.
    """
    place = _Address.parse("address", address)
    place.need_port()
    chosen = {**dict(_KEEPALIVE), **dict(options)}
    if credentials is not None:
        chosen["grpc.ssl_target_name_override"] = server_host(role)
        tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
        return grpc.aio.secure_channel(str(place), tls, options=list(chosen.items()))
    place.need_loopback()
    chosen["grpc.enable_http_proxy"] = 0  # a proxy would be another machine
    channel = grpc.aio.insecure_channel(str(place), options=list(chosen.items()))
    return channel if party is None else _Introducing(channel, party)


async def listen(server: grpc.aio.Server, address: str, credentials: Credentials | None) -> int:
    """Open a port for parties with a certificate, and return its number; port 0 selects a free one.

    The server must be created with `SERVER_OPTIONS`. Without credentials it is plain text, on this machine only. For
    unix:PATH, which has no port, gRPC returns 1.
    """
    place = _Address.parse("listen", address)
    if credentials is None:
        place.need_loopback()
    elif credentials.party.role not in SERVERS:
        remedy = "Listen with the certificate of edge or fed: no device or server would connect to another"
        raise InvalidInput("listen", f"the certificate is that of {credentials.party}", remedy)
    try:
        if credentials is None:
            return int(server.add_insecure_port(str(place)))
        pair = (credentials.key, credentials.certificate)
        tls = grpc.ssl_server_credentials([pair], credentials.ca, require_client_auth=True)
        return int(server.add_secure_port(str(place), tls))
    except RuntimeError:  # gRPC writes the reason to standard error only
        remedy = (
            "Another program may have that port (choose another, or 0 for any that is free), the host may be no "
            "address of this machine (0.0.0.0 is all of them), or ports below 1024 may not be allowed"
        )
        raise InvalidInput("listen", f"{place} cannot be opened", remedy) from None


def caller(context: grpc.aio.ServicerContext) -> Party | None:
    """Return the caller: from its certificate over TLS, from its metadata over plain text; None if these name no party.

    The connection decides which of the two counts, so metadata of a TLS caller are never read.
    """
    found = context.auth_context()
    kind = found.get("transport_security_type")
    if kind == [b"ssl"]:
        return _one_party(uri.decode("utf-8", "replace") for uri in found.get("peer_uri", ()))
    if kind == [b"insecure"]:
        said = (value for key, value in context.invocation_metadata() or () if key == PARTY_METADATA)
        return _one_party(SCHEME + value for value in said)
    return None


async def require(context: grpc.aio.ServicerContext, role: Role | Collection[Role], name: str | None = None) -> Party:
    """Return the caller if it has that role (and that name, where one is given), else abort the call."""
    roles: Collection[str] = (role,) if isinstance(role, str) else role
    party = caller(context)
    if party is None:
        code = grpc.StatusCode.UNAUTHENTICATED
        why = "the caller is no known party: call with a certificate made by `adaptsfl certs`"
    elif party.role not in roles:
        code = grpc.StatusCode.PERMISSION_DENIED
        why = f"this is for {' and '.join(sorted(roles))} only, and the caller is {party}"
    elif name is not None and party.name != name:
        code = grpc.StatusCode.PERMISSION_DENIED
        why = f"this is for {name} only, and the caller is {party}"
    else:
        return party
    await context.abort(code, why)
    raise AssertionError("abort returned")  # pragma: no cover (it never does)


def _party_from(text: str) -> Party | None:
    """Return the party that adaptsfl:ROLE/NAME names; None if it is not valid."""
    role, _, name = text.removeprefix(SCHEME).partition("/")
    known = text.startswith(SCHEME) and role in get_args(Role)
    if known and (name == role if role in SERVERS else is_device_name(name)):
        return Party(cast(Role, role), name)
    return None


def _one_party(texts: Iterable[str]) -> Party | None:
    """Return the only party among names; None if there are two or more, which is ambiguous."""
    ours = [text for text in texts if text.startswith(SCHEME)]
    return _party_from(ours[0]) if len(ours) == 1 else None


def _read(place: Path) -> bytes:
    try:
        return place.read_bytes()
    except FileNotFoundError:
        remedy = "Copy it from where `adaptsfl certs` was run; a party needs its own .pem and .key, and ca.pem"
        raise InvalidInput(str(place), "is missing", remedy) from None
    except OSError as error:
        remedy = "Make it readable for the user that runs this party"
        raise InvalidInput(str(place), f"cannot be read ({error.strerror})", remedy) from None


def _certificates(place: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise InvalidInput(str(place), "is no PEM certificate", "Copy it again; it may be cut short") from None


def _party_of(place: Path, certificate: x509.Certificate) -> Party:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        party = _one_party(names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        party = None
    if party is None:
        remedy = "Use a certificate made by `adaptsfl certs`, which holds one as URI adaptsfl:ROLE/NAME"
        raise InvalidInput(str(place), "names no role of AdaptSFL", remedy)
    return party


def _check_key(place: Path, pem: bytes, certificate: x509.Certificate) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except ValueError:
        raise InvalidInput(str(place), "is no PEM key", "Copy it again; it may be cut short") from None
    except TypeError:
        remedy = "Give one without; the file's mode protects it"
        raise InvalidInput(str(place), "is encrypted with a password", remedy) from None
    if key.public_key() != certificate.public_key():
        remedy = "Copy both files again, or renew the certificate: adaptsfl certs FOLDER --renew NAME"
        raise InvalidInput(str(place), f"does not belong to {place.with_suffix('.pem').name}", remedy)
    # A warning, no error: secrets mounted into containers often have such modes, and containers have no other users.
    if os.name == "posix" and (mode := place.stat().st_mode) & 0o077:
        what = f"{place}: may be read by other users of this machine (mode {mode & 0o777:o}). Run: chmod 600 {place}"
        warnings.warn(what, CredentialsWarning, stacklevel=3)


def _issued(ca: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_time(place: Path, certificate: x509.Certificate, remedy: str) -> None:
    now, begins, ends = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        problem = f"is valid from {begins:%Y-%m-%d %H:%M} UTC on, and here it is {now:%Y-%m-%d %H:%M} UTC"
        raise InvalidInput(str(place), problem, "Set this machine's clock, or wait until then")
    if now > ends:
        problem = f"expired on {ends:%Y-%m-%d %H:%M} UTC, and here it is {now:%Y-%m-%d %H:%M} UTC"
        raise InvalidInput(str(place), problem, remedy)


@dataclass(frozen=True)
class _Address:
    """The address of a server: a socket's path, or a host and a port."""

    field: str
    host: str  # empty for a socket of this machine's file system
    port: int
    path: str = ""

    @classmethod
    def parse(cls, field: str, text: str) -> "_Address":
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(field, "", 0, text)
        parts = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", text)
        if parts is None or int(parts[2]) > 65535:
            remedy = "Give HOST:PORT, for example 192.168.1.5:50051, [::1]:50051 or edge.example.org:50051"
            raise InvalidInput(field, f"is {short(text)}", remedy)
        return cls(field, parts[1].strip("[]"), int(parts[2]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"

    def need_port(self) -> None:
        if self.host and not self.port:
            raise InvalidInput(self.field, f"{self} has no port", "Give the port that the server said it listens on")

    def need_loopback(self) -> None:
        """Reject plain text where others could read or change it."""
        try:
            local = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            local = self.host in ("", "localhost")
        if not local:
            remedy = "Make certificates with `adaptsfl certs`, or use 127.0.0.1, where only this machine gets to"
            raise InvalidInput(self.field, f"{self} is open to the network, and there are no certificates", remedy)


class _Introducing(grpc.aio.Channel):  # type: ignore[misc]  # grpc has no types
    """A channel that adds the caller's party to the metadata of every call.

    It is not an interceptor: gRPC puts a queue between interceptors and streams, so calls would differ from those over
    TLS.
    """

    def __init__(self, channel: grpc.aio.Channel, party: Party) -> None:
        self._channel = channel
        self._said = (PARTY_METADATA, str(party))

    def _introduced(self, call: Any) -> Any:
        def begin(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), self._said), **kwargs)

        return begin

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._introduced(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._introduced(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._introduced(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._introduced(self._channel.stream_stream(*args, **kwargs))

    async def __aenter__(self) -> "_Introducing":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> Any:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
