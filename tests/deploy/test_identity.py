"""Who gets in and who does not, at real servers on this machine."""

import asyncio
import os
import shutil
import socket
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from adaptsfl.deploy.security import certs, identity
from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.deploy.security.identity import (
    SERVER_OPTIONS,
    Credentials,
    CredentialsWarning,
    Party,
    caller,
    listen,
    load_credentials,
    open_channel,
    require,
)
from adaptsfl.errors import InvalidInput

LONG_S = 600  # no test waits so long unless something hangs
DEVICE_1 = Party("device", "device-1")
CLAIM = (("adaptsfl-party", "edge/edge"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("certs")
    make_certificates(place, ["device-1", "device-2"])
    return place


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The same parties by another authority."""
    place = tmp_path_factory.mktemp("others")
    make_certificates(place, ["device-1"])
    return place


@pytest.fixture
def copied(folder, tmp_path):
    """A folder to break."""
    return Path(shutil.copytree(folder, tmp_path / "certs"))


def unchecked(folder: Path, name: str) -> Credentials:
    """Credentials of somebody who does not look at them before they are shown."""
    ca, certificate, key = ((folder / file).read_bytes() for file in ("ca.pem", f"{name}.pem", f"{name}.key"))
    return Credentials(ca, certificate, key, Party(name if name in ("edge", "fed") else "device", name))


def issued_at(folder: Path, when: datetime, monkeypatch, name: str) -> Credentials:
    """Credentials by the same authority, made at another time and valid for a day."""
    with monkeypatch.context() as patch:
        patch.setattr(certs, "_now", lambda: when)
        certs.renew_certificate(folder, name, days=1)
    return unchecked(folder, name)


class Service:
    """Calls that are answered with who called, and what was called by whom."""

    def __init__(self):
        self.answered = []

    async def who(self, request, context):
        self.answered.append(str(caller(context)))
        return str(caller(context)).encode()

    async def chat(self, requests, context):
        async for request in requests:
            yield request + str(caller(context)).encode()

    async def collect(self, requests, context):
        return b"".join([request async for request in requests]) + str(caller(context)).encode()

    async def tell(self, request, context):
        yield str(caller(context)).encode()

    async def for_edge(self, request, context):
        return await self._required(context, "edge")

    async def for_servers(self, request, context):
        return await self._required(context, ("edge", "fed"))

    async def for_device(self, request, context):
        return await self._required(context, "device", request.decode())

    async def _required(self, context, role, name=None):
        party = await require(context, role, name)
        self.answered.append(str(party))
        return str(party).encode()

    def handler(self):
        unary = {
            name: grpc.unary_unary_rpc_method_handler(getattr(self, name))
            for name in ("who", "for_edge", "for_servers", "for_device")
        }
        streams = {
            "chat": grpc.stream_stream_rpc_method_handler(self.chat),
            "collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "tell": grpc.unary_stream_rpc_method_handler(self.tell),
        }
        return grpc.method_handlers_generic_handler("test", unary | streams)


@asynccontextmanager
async def serving(credentials, address="127.0.0.1:0", open_port=listen):
    """Yield a service and its address while it is up."""
    service = Service()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service.handler(),))
    try:
        port = await open_port(server, address, credentials)
        await server.start()
        yield service, address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
    finally:
        await server.stop(None)


async def ask(channel, method="who", request=b"", **more) -> str:
    async with channel:
        return (await channel.unary_unary(f"/test/{method}")(request, timeout=LONG_S, **more)).decode()


async def refused(channel, method="who", request=b"", **more) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await ask(channel, method, request, **more)
    return failure.value


def test_a_device_is_known_to_the_edge_server_by_its_certificate(folder):
    async def scene():
        async with serving(load_credentials(folder, "edge")) as (_, address):
            for name in ("device-1", "device-2"):
                credentials = load_credentials(folder, name)
                assert await ask(open_channel(address, "edge", credentials)) == f"device/{name}"
                assert await ask(open_channel(address, "edge", credentials), "for_device", name.encode())

    asyncio.run(scene())


def test_the_edge_server_is_known_to_the_fed_server(folder):
    async def scene():
        async with serving(load_credentials(folder, "fed")) as (_, address):
            edge = load_credentials(folder, "edge")
            for method in ("for_edge", "for_servers"):
                assert await ask(open_channel(address, "fed", edge), method) == "edge/edge"

    asyncio.run(scene())


def never_reached(folder, client, role="edge", server="edge"):
    """One call that must end in the handshake, at a server that answers others."""

    async def scene():
        async with serving(load_credentials(folder, server)) as (service, address):
            good = open_channel(address, server, load_credentials(folder, "device-1"))
            assert await ask(good) == "device/device-1"
            channel = client(address) if callable(client) else open_channel(address, role, client)
            failure = await refused(channel)
            assert failure.code() == grpc.StatusCode.UNAVAILABLE
            assert service.answered == ["device/device-1"]
            return failure.details()

    return asyncio.run(scene())


def test_a_caller_of_another_authority_is_refused(folder, others):
    mixed = unchecked(others, "device-1")
    mixed = Credentials((folder / "ca.pem").read_bytes(), mixed.certificate, mixed.key, mixed.party)
    never_reached(folder, mixed)


def test_a_server_of_another_authority_is_refused(folder, others):
    mine = load_credentials(folder, "device-1")
    believing_others = Credentials((others / "ca.pem").read_bytes(), mine.certificate, mine.key, mine.party)
    assert "CERTIFICATE_VERIFY_FAILED" in never_reached(folder, believing_others)


def test_a_caller_whose_certificate_expired_is_refused(folder, copied, monkeypatch):
    never_reached(folder, issued_at(copied, datetime.now(UTC) - timedelta(days=3), monkeypatch, "device-2"))


def test_a_caller_whose_certificate_is_not_yet_valid_is_refused(folder, copied, monkeypatch):
    never_reached(folder, issued_at(copied, datetime.now(UTC) + timedelta(days=3), monkeypatch, "device-2"))


@pytest.mark.parametrize("days", [0, -3, 3])
def test_a_server_whose_certificate_is_not_valid_today_is_refused(folder, copied, monkeypatch, days):
    edge = issued_at(copied, datetime.now(UTC) + timedelta(days=days), monkeypatch, "edge")

    async def scene():
        async with serving(edge) as (service, address):
            channel = open_channel(address, "edge", load_credentials(folder, "device-1"))
            if days == 0:
                assert await ask(channel) == "device/device-1"
            else:
                assert (await refused(channel)).code() == grpc.StatusCode.UNAVAILABLE
                assert service.answered == []

    asyncio.run(scene())


def test_a_certificate_issued_with_that_of_a_server_is_refused(folder):
    """A party is no authority, however good its own certificate is."""
    edge = unchecked(folder, "edge")
    authority = certs._Authority(
        x509.load_pem_x509_certificate(edge.certificate), load_pem_private_key(edge.key, password=None)
    )
    key = ec.generate_private_key(ec.SECP256R1())
    forged = certs._sign("fed", key.public_key(), authority, 1).public_bytes(Encoding.PEM)
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    never_reached(folder, Credentials(edge.ca, forged + edge.certificate, key_pem, Party("fed", "fed")))


def test_the_edge_certificate_at_the_fed_address_is_refused(folder):
    details = never_reached(folder, load_credentials(folder, "device-1"), role="fed", server="edge")
    assert "Hostname Verification Check failed" in details


def test_options_cannot_loosen_which_server_is_accepted(folder):
    credentials = load_credentials(folder, "device-1")
    options = [("grpc.ssl_target_name_override", "edge.adaptsfl")]
    never_reached(folder, lambda address: open_channel(address, "fed", credentials, options=options))


def test_a_plaintext_caller_at_a_tls_server_is_refused(folder):
    never_reached(folder, lambda address: open_channel(address, "edge", None, DEVICE_1))


def test_a_tls_caller_without_a_certificate_is_refused(folder):
    tls = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "edge.adaptsfl")]
    never_reached(folder, lambda address: grpc.aio.secure_channel(address, tls, options=options))


def test_a_device_certificate_presented_as_a_server_is_refused(folder):
    async def impostor(server, address, credentials):
        pair = (credentials.key, credentials.certificate)
        tls = grpc.ssl_server_credentials([pair], credentials.ca, require_client_auth=True)
        return server.add_secure_port(address, tls)

    async def scene(name):
        async with serving(unchecked(folder, name), open_port=impostor) as (service, address):
            credentials = load_credentials(folder, "device-1")
            if name == "edge":
                return await ask(open_channel(address, "edge", credentials))
            failure = await refused(open_channel(address, "edge", credentials))
            assert failure.code() == grpc.StatusCode.UNAVAILABLE
            return service.answered

    assert asyncio.run(scene("edge")) == "device/device-1"
    assert asyncio.run(scene("device-2")) == []


def test_no_device_listens_by_mistake(folder):
    async def scene():
        async with serving(load_credentials(folder, "device-1")):
            pass

    with pytest.raises(InvalidInput, match=r"certificate is that of device/device-1.*edge or fed"):
        asyncio.run(scene())


def test_a_tls_caller_to_a_plaintext_server_is_refused(folder):
    """Who was told to use TLS never falls back to plain text."""

    async def scene():
        async with serving(None) as (service, address):
            failure = await refused(open_channel(address, "edge", load_credentials(folder, "device-1")))
            assert failure.code() == grpc.StatusCode.UNAVAILABLE
            assert service.answered == []

    asyncio.run(scene())


@pytest.mark.parametrize("method", ["for_edge", "for_servers"])
def test_a_device_calling_what_is_for_servers_is_refused(folder, method):
    async def scene():
        async with serving(load_credentials(folder, "fed")) as (service, address):
            failure = await refused(open_channel(address, "fed", load_credentials(folder, "device-1")), method)
            assert failure.code() == grpc.StatusCode.PERMISSION_DENIED
            wanted = "edge" if method == "for_edge" else "edge and fed"
            assert failure.details() == f"this is for {wanted} only, and the caller is device/device-1"
            assert service.answered == []

    asyncio.run(scene())


def test_a_device_calling_in_the_name_of_another_is_refused(folder):
    async def scene():
        async with serving(load_credentials(folder, "edge")) as (service, address):
            channel = open_channel(address, "edge", load_credentials(folder, "device-1"))
            failure = await refused(channel, "for_device", b"device-2")
            assert failure.code() == grpc.StatusCode.PERMISSION_DENIED
            assert failure.details() == "this is for device-2 only, and the caller is device/device-1"
            assert service.answered == []

    asyncio.run(scene())


def test_what_a_tls_caller_says_of_itself_is_not_believed(folder):
    async def scene():
        async with serving(load_credentials(folder, "fed")) as (_, address):
            device = load_credentials(folder, "device-1")
            assert await ask(open_channel(address, "fed", device), metadata=CLAIM) == "device/device-1"
            failure = await refused(open_channel(address, "fed", device), "for_edge", metadata=CLAIM)
            assert failure.code() == grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(scene())


@pytest.mark.parametrize("uris", [[], ["adaptsfl:edge/other"], ["adaptsfl:edge/edge", "adaptsfl:device/device-1"]])
def test_a_certificate_by_the_right_authority_that_names_no_one_party(folder, uris):
    """Not even with metadata: the connection is TLS, so only the certificate counts."""
    credentials = with_names(folder, [x509.UniformResourceIdentifier(uri) for uri in uris])

    async def scene():
        async with serving(load_credentials(folder, "edge")) as (service, address):
            failure = await refused(open_channel(address, "edge", credentials), "for_edge", metadata=CLAIM)
            assert failure.code() == grpc.StatusCode.UNAUTHENTICATED
            assert "adaptsfl certs" in failure.details()
            assert await ask(open_channel(address, "edge", credentials), metadata=CLAIM) == "None"
            assert service.answered == ["None"]

    asyncio.run(scene())


def with_names(folder: Path, names) -> Credentials:
    """A certificate by our authority, with these alternative names, or without any."""
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    begins, subject = datetime.now(UTC) - timedelta(hours=1), certs._subject("edge.adaptsfl")
    builder = x509.CertificateBuilder(
        ca.subject, subject, key.public_key(), x509.random_serial_number(), begins, begins + timedelta(days=1)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    ca_key = load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    certificate = builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Credentials((folder / "ca.pem").read_bytes(), certificate, key_pem, Party("edge", "edge"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "unix"])
def test_without_certificates_callers_on_this_machine_are_believed(tmp_path, host):
    async def scene():
        address = f"unix:{tmp_path}/socket" if host == "unix" else f"{host}:0"
        async with serving(None, address) as (_, at):
            assert await ask(open_channel(at, "edge", None, DEVICE_1), "for_device", b"device-1") == "device/device-1"
            failure = await refused(open_channel(at, "edge", None, DEVICE_1), "for_edge")
            assert failure.code() == grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(scene())


def test_plain_text_on_version_6_of_loopback():
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")

    async def scene():
        async with serving(None, "[::1]:0") as (_, address):
            assert await ask(open_channel(address, "edge", None, DEVICE_1)) == "device/device-1"

    asyncio.run(scene())


@pytest.mark.parametrize("said", [(), ("nobody",), ("edge/other",), ("device/edge",), ("edge/edge", "device/device-1")])
def test_without_certificates_too_a_caller_has_to_be_one_party(said):
    async def scene():
        async with serving(None) as (_, address):
            metadata = [("adaptsfl-party", text) for text in said]
            failure = await refused(open_channel(address, "edge", None), "for_servers", metadata=metadata)
            assert failure.code() == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scene())


@pytest.mark.parametrize("kind", [{}, {"transport_security_type": [b"local"]}])
def test_over_anything_but_tls_and_plain_text_nobody_is_known(kind):
    class Context:
        def auth_context(self):
            return kind

        def invocation_metadata(self):
            return CLAIM

    assert caller(Context()) is None


@pytest.mark.parametrize("secure", [True, False])
def test_every_kind_of_call_says_who_calls_and_keeps_its_metadata(folder, secure):
    server, device = (load_credentials(folder, name) if secure else None for name in ("edge", "device-1"))

    async def scene():
        async with serving(server) as (_, address), open_channel(address, "edge", device, DEVICE_1) as channel:
            await asyncio.wait_for(channel.channel_ready(), LONG_S)
            assert channel.get_state() == grpc.ChannelConnectivity.READY
            chat = channel.stream_stream("/test/chat")(timeout=LONG_S)
            for request in (b"1 ", b"2 "):  # written and read in turn, as rounds are
                await chat.write(request)
                assert await chat.read() == request + b"device/device-1"
            await chat.done_writing()
            assert await chat.read() is grpc.aio.EOF
            assert await chat.code() == grpc.StatusCode.OK
            assert await channel.stream_unary("/test/collect")(iter([b"a", b"b "])) == b"ab device/device-1"
            told = [one async for one in channel.unary_stream("/test/tell")(b"", timeout=LONG_S)]
            assert told == [b"device/device-1"]
            more = (("other", "value"),)
            assert await channel.unary_unary("/test/who")(b"", metadata=more) == b"device/device-1"

    asyncio.run(scene())


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "[::]", "192.168.1.5", "example.org", "127.0.0.1.example.org", "localhost.example.org"]
)
def test_nothing_is_plain_text_in_the_network(host):
    async def scene():
        async with serving(None, f"{host}:0"):
            pass

    with pytest.raises(InvalidInput, match=r"listen: .* is open to the network.*adaptsfl certs"):
        asyncio.run(scene())
    with pytest.raises(InvalidInput, match=r"address: .* is open to the network.*adaptsfl certs"):
        open_channel(f"{host}:50051", "edge", None, DEVICE_1)


def test_plain_text_does_not_leave_the_machine_by_way_of_a_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)

    async def scene():
        async with serving(None) as (_, address):
            assert await ask(open_channel(address, "edge", None, DEVICE_1)) == "device/device-1"

    asyncio.run(scene())


@pytest.mark.parametrize(
    "address", ["", "50051", ":50051", "host", "host:", "host:x", "host:70000", "::1:50051", "unix:", "http://host:80"]
)
def test_addresses_that_are_none(address, folder):
    credentials = load_credentials(folder, "edge")

    async def scene():
        async with serving(credentials, address):
            pass

    with pytest.raises(InvalidInput, match=r"listen: is .* Give HOST:PORT"):
        asyncio.run(scene())
    with pytest.raises(InvalidInput, match=r"address: is .* Give HOST:PORT"):
        open_channel(address, "edge", credentials)


def test_a_channel_needs_a_port():
    with pytest.raises(InvalidInput, match=r"has no port.*that the server said"):
        open_channel("127.0.0.1:0", "edge", None)


@pytest.mark.parametrize("secure", [True, False])
def test_an_address_in_use(folder, secure):
    credentials = load_credentials(folder, "edge") if secure else None

    async def scene():
        async with serving(credentials) as (_, address):
            with pytest.raises(InvalidInput, match=rf"listen: {address} cannot be opened.*Another program"):
                async with serving(credentials, address):
                    pass

    asyncio.run(scene())


def test_grpc_knows_every_option_that_is_set():
    """It ignores names that it does not know, and they differ from what its documentation calls them."""
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()
    for name, _ in (*SERVER_OPTIONS, ("grpc.ssl_target_name_override", ""), ("grpc.enable_http_proxy", 0)):
        assert name.encode() + b"\0" in library, name


def test_a_server_allows_pings_as_often_as_channels_send_them():
    server = dict(SERVER_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < dict(identity._KEEPALIVE)["grpc.keepalive_time_ms"]


def test_credentials_are_what_the_files_say(folder):
    for name, role in [("device-1", "device"), ("edge", "edge"), ("fed", "fed")]:
        credentials = load_credentials(folder, name)
        assert credentials.party == Party(role, name)
        assert str(credentials.party) == f"{role}/{name}"
        assert credentials.certificate == (folder / f"{name}.pem").read_bytes()


def test_a_key_is_not_printed(folder):
    assert repr(load_credentials(folder, "edge")) == "Credentials(edge/edge)"


def test_several_authorities_can_be_trusted_while_one_replaces_another(copied, others):
    (copied / "ca.pem").write_bytes((others / "ca.pem").read_bytes() + (copied / "ca.pem").read_bytes())
    server, moved = load_credentials(copied, "edge"), unchecked(others, "device-1")
    both = Credentials(server.ca, moved.certificate, moved.key, moved.party)

    async def scene():
        async with serving(server) as (_, address):
            assert await ask(open_channel(address, "edge", load_credentials(copied, "device-1"))) == "device/device-1"
            assert await ask(open_channel(address, "edge", both)) == "device/device-1"

    asyncio.run(scene())


@pytest.mark.parametrize("file", ["ca.pem", "device-1.pem", "device-1.key"])
def test_a_missing_file(copied, file):
    (copied / file).unlink()
    with pytest.raises(InvalidInput, match=rf"{file}: is missing.*its own \.pem and \.key, and ca\.pem"):
        load_credentials(copied, "device-1")


def test_a_missing_folder(tmp_path):
    with pytest.raises(InvalidInput, match="nowhere: is no folder"):
        load_credentials(tmp_path / "nowhere", "device-1")


def test_a_file_that_cannot_be_read(copied):
    (copied / "device-1.key").unlink()
    (copied / "device-1.key").mkdir()
    with pytest.raises(InvalidInput, match=r"device-1\.key: cannot be read"):
        load_credentials(copied, "device-1")


@pytest.mark.parametrize(
    ("file", "what"), [("ca.pem", "certificate"), ("device-1.pem", "certificate"), ("device-1.key", "key")]
)
@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN CERTIFICATE-----\nMIIB\n"])
def test_a_file_that_is_not_pem(copied, file, what, content):
    (copied / file).write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"{file}: is no PEM {what}"):
        load_credentials(copied, "device-1")


def test_a_key_with_a_password(copied):
    key = load_pem_private_key((copied / "edge.key").read_bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (copied / "edge.key").write_bytes(encrypted)
    with pytest.raises(InvalidInput, match=r"edge\.key: is encrypted"):
        load_credentials(copied, "edge")


def test_a_key_of_another_certificate(copied):
    shutil.copy(copied / "device-2.key", copied / "device-1.key")
    with pytest.raises(InvalidInput, match=r"device-1\.key: does not belong to device-1\.pem"):
        load_credentials(copied, "device-1")


def test_a_certificate_under_another_name(copied):
    for end in ("pem", "key"):
        shutil.copy(copied / f"device-2.{end}", copied / f"device-1.{end}")
    with pytest.raises(InvalidInput, match=r"device-1\.pem: is the certificate of device/device-2"):
        load_credentials(copied, "device-1")


def test_a_certificate_by_another_authority(copied, others):
    shutil.copy(others / "ca.pem", copied / "ca.pem")
    with pytest.raises(InvalidInput, match=r"device-1\.pem: is not signed by ca\.pem"):
        load_credentials(copied, "device-1")


def test_an_expired_certificate(copied, monkeypatch):
    made = datetime.now(UTC) - timedelta(days=3)
    issued_at(copied, made, monkeypatch, "device-1")
    end = made + timedelta(days=1)
    with pytest.raises(InvalidInput, match=rf"device-1\.pem: expired on {end:%Y-%m-%d %H:%M} UTC.*--renew device-1"):
        load_credentials(copied, "device-1")


def test_a_certificate_of_the_future(copied, monkeypatch):
    made = datetime.now(UTC) + timedelta(days=3)
    issued_at(copied, made, monkeypatch, "device-1")
    begins = made - certs._SKEW
    with pytest.raises(InvalidInput, match=rf"device-1\.pem: is valid from {begins:%Y-%m-%d %H:%M} UTC.*clock"):
        load_credentials(copied, "device-1")


def test_an_expired_authority(tmp_path, monkeypatch):
    monkeypatch.setattr(certs, "_now", lambda: datetime.now(UTC) - timedelta(days=20_000))
    make_certificates(tmp_path, [])
    key = certs._load_key(tmp_path / "ca.key")
    authority = certs._Authority(x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes()), key)
    monkeypatch.undo()
    monkeypatch.setattr(certs, "min", lambda asked, _: asked, raising=False)  # a certificate that outlives it
    certs._issue(tmp_path, "edge", authority, 10)
    with pytest.raises(InvalidInput, match=r"ca\.pem: expired on .*new authority"):
        load_credentials(tmp_path, "edge")


@pytest.mark.parametrize("uris", [[], ["https://example.org"], ["adaptsfl:boss/me"], ["adaptsfl:edge/e"]])
def test_a_certificate_without_a_role(copied, uris):
    credentials = with_names(copied, [x509.UniformResourceIdentifier(uri) for uri in uris])
    (copied / "edge.pem").write_bytes(credentials.certificate)
    (copied / "edge.key").write_bytes(credentials.key)
    with pytest.raises(InvalidInput, match=r"edge\.pem: names no role of AdaptSFL"):
        load_credentials(copied, "edge")


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_warned_of(copied, mode):
    (copied / "device-1.key").chmod(mode)
    with pytest.warns(CredentialsWarning, match=rf"mode {mode:o}.*chmod 600"):
        assert load_credentials(copied, "device-1").party == DEVICE_1
