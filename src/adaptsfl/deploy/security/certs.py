"""A private certificate authority, and one certificate per party, with the party's role and name.

All files are in one folder: ca.pem, ca.key, and NAME.pem with NAME.key for `edge`, `fed` and every device. A key is
written before its certificate, so that the next call completes an interrupted one. An existing certificate is not
changed, even if its key was moved to the party that owns it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from adaptsfl.checks import short, whole_number
from adaptsfl.errors import InvalidInput
from adaptsfl.files import replace_file, writing

SERVERS = ("edge", "fed")
AUTHORITY = "ca"
SCHEME = "adaptsfl:"  # of the URI ROLE/NAME in a certificate

_LONGEST_DAYS = 36500
_AUTHORITY_DAYS = 3650  # a new authority needs new certificates for all parties
_SKEW = timedelta(hours=1)  # a new certificate must be valid on devices whose clocks are slow
_DEVICE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
GO_ON = "Give a folder that you may write to; the same command then goes on with what is missing"


def is_device_name(name: str) -> bool:
    """Whether a device may have this name: valid as a file name, and not that of a server or the authority."""
    return bool(_DEVICE_NAME.fullmatch(name)) and name.lower() not in (*SERVERS, AUTHORITY)


def server_host(role: str) -> str:
    """Return the host name in a server's certificate, which depends on its role and not on its machine."""
    return f"{role}.adaptsfl"


def make_certificates(folder: Path, devices: Sequence[str], *, days: int = 365) -> list[Path]:
    """Make the authority and the certificates of both servers and `devices`, where missing; return the new files.

    Existing files are not changed. Certificates are valid for `days`, and never longer than the authority's own.
    """
    folder = Path(folder)
    names = [*SERVERS, *_checked(devices)]
    whole_number("days", days, at_most=_LONGEST_DAYS)
    missing = [name for name in names if not _certificate_of(folder, name).exists()]
    if not missing and _certificate_of(folder, AUTHORITY).exists():
        return []
    with writing(folder, GO_ON):
        authority, made = _open_authority(folder, days)
        for name in missing:
            made += _issue(folder, name, authority, days)
    return made


def renew_certificate(folder: Path, name: str, *, days: int = 365) -> list[Path]:
    """Replace one party's certificate, and its key, by new ones; return their files."""
    folder = Path(folder)
    whole_number("days", days, at_most=_LONGEST_DAYS)
    if name == AUTHORITY:
        remedy = "A new authority needs new certificates for all: make them in an empty folder"
        raise InvalidInput("renew", "is the authority itself", remedy)
    if not (name in SERVERS or is_device_name(name)) or not _certificate_of(folder, name).exists():
        there = ", ".join(sorted(valid_until(folder))) or "none"
        raise InvalidInput("renew", f"there is no certificate of {short(name)} in {folder}", f"There are: {there}")
    with writing(folder, GO_ON):
        authority, made = _open_authority(folder, days)
        return made + _issue(folder, name, authority, days, key=ec.generate_private_key(ec.SECP256R1()))


def valid_until(folder: Path) -> dict[str, datetime]:
    """Return when each party's certificate in a folder expires, by name; other files are left out."""
    ends = {}
    for path in sorted(Path(folder).glob("*.pem")):
        try:
            ends[path.stem] = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        except (OSError, ValueError):
            continue
    ends.pop(AUTHORITY, None)
    return ends


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _checked(devices: Sequence[str]) -> list[str]:
    """Return the devices' names without duplicates, after a check."""
    names = list(dict.fromkeys(devices))
    for name in names:
        if not is_device_name(name):
            remedy = "Give up to 64 letters, digits, - and _, and none of edge, fed and ca"
            raise InvalidInput("device", f"cannot be called {short(name)}", remedy)
    if len({name.lower() for name in names}) < len(names):
        first, second = next((a, b) for a in names for b in names if a != b and a.lower() == b.lower())
        remedy = "Give names that stay apart where files do not tell capital letters"
        raise InvalidInput("device", f"{first!r} and {second!r} differ in capital letters only", remedy)
    return names


def _certificate_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.pem"


def _key_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.key"


def _open_authority(folder: Path, days: int) -> tuple[_Authority, list[Path]]:
    """Return the folder's authority and the files that were made for it: none, if it existed."""
    place = _certificate_of(folder, AUTHORITY)
    if place.exists():
        return _load_authority(folder), []
    made: list[Path] = []
    key_place = _key_of(folder, AUTHORITY)
    if not key_place.exists() and (orphans := sorted(valid_until(folder))):
        remedy = "Put it back, with ca.key, or give an empty folder for new certificates of all"
        raise InvalidInput(str(place), f"is missing, but there are certificates of {', '.join(orphans)}", remedy)
    key = _key_in(folder, AUTHORITY, made)
    name = _subject("AdaptSFL certificate authority")
    certificate = (
        _begun(name, name, key.public_key(), _now() + timedelta(days=max(days, _AUTHORITY_DAYS)))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    made.append(_write(place, certificate.public_bytes(Encoding.PEM), 0o644))
    return _Authority(certificate, key), made


def _load_authority(folder: Path) -> _Authority:
    """Read ca.pem and ca.key, and check that they can sign certificates."""
    place, key_place = _certificate_of(folder, AUTHORITY), _key_of(folder, AUTHORITY)
    if not key_place.exists():
        remedy = "Make certificates where the authority was made, or in an empty folder with a new one"
        raise InvalidInput(str(key_place), "is missing, and without it no certificate can be made", remedy)
    try:
        certificates = x509.load_pem_x509_certificates(place.read_bytes())
    except ValueError:
        remedy = "Restore it, or give an empty folder for a new authority"
        raise InvalidInput(str(place), "is no PEM certificate", remedy) from None
    key = _load_key(key_place)
    certificate = next((one for one in certificates if one.public_key() == key.public_key()), None)
    if certificate is None:
        remedy = "Restore the two files that belong together, or give an empty folder for a new authority"
        raise InvalidInput(str(key_place), "does not belong to ca.pem", remedy)
    if certificate.not_valid_after_utc <= _now():
        remedy = "Make a new authority, and with it new certificates for all, in an empty folder"
        raise InvalidInput(str(place), f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}", remedy)
    return _Authority(certificate, key)


def _load_key(place: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(place.read_bytes(), password=None)
    except (ValueError, TypeError):  # TypeError for keys with a password
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        remedy = "Restore it from a copy; delete it only if nobody uses it"
        raise InvalidInput(str(place), "is no PEM file with an elliptic-curve key without a password", remedy)
    return key


def _key_in(folder: Path, name: str, made: list[Path]) -> ec.EllipticCurvePrivateKey:
    """Return a party's key: the one that an interrupted call left, or a new one, which is written."""
    place = _key_of(folder, name)
    if place.exists():
        return _load_key(place)
    key = ec.generate_private_key(ec.SECP256R1())
    made.append(_write_key(place, key))
    return key


def _issue(
    folder: Path, name: str, authority: _Authority, days: int, key: ec.EllipticCurvePrivateKey | None = None
) -> list[Path]:
    """Write one party's key and certificate; a key that is given replaces the existing one."""
    made: list[Path] = []
    if key is None:
        key = _key_in(folder, name, made)
    else:
        made.append(_write_key(_key_of(folder, name), key))
    certificate = _sign(name, key.public_key(), authority, days)
    made.append(_write(_certificate_of(folder, name), certificate.public_bytes(Encoding.PEM), 0o644))
    return made


def _sign(name: str, key: ec.EllipticCurvePublicKey, authority: _Authority, days: int) -> x509.Certificate:
    role = name if name in SERVERS else "device"
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{SCHEME}{role}/{name}")]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role in SERVERS:  # servers are clients too: the edge server calls the fed server; devices are clients only
        names.append(x509.DNSName(server_host(role)))
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    ends = min(_now() + timedelta(days=days), authority.certificate.not_valid_after_utc)
    issuer_id = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _begun(_subject(name), authority.certificate.subject, key, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, ends: datetime
) -> x509.CertificateBuilder:
    """Return a builder with the fields that all certificates share."""
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), _now() - _SKEW, ends)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(place: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    return _write(place, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)


def _write(place: Path, content: bytes, mode: int) -> Path:
    def fill(temporary: Path) -> None:  # no other user can read it at any time
        temporary.write_bytes(content)
        temporary.chmod(mode)

    replace_file(place, fill)
    return place


def _now() -> datetime:
    return datetime.now(UTC)
