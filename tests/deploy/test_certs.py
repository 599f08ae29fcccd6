"""Certificates: what is in them, and what is never overwritten."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from typer.testing import CliRunner

from adaptsfl.cli import app, failures
from adaptsfl.deploy.security import certs
from adaptsfl.deploy.security.certs import make_certificates, renew_certificate, valid_until
from adaptsfl.errors import InvalidInput, NotWritten


def certificate(folder, name):
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(paths):
    return [path.name for path in paths]


@pytest.fixture
def folder(tmp_path):
    make_certificates(tmp_path / "certs", ["device-1"])
    return tmp_path / "certs"


def test_every_party_has_its_files_and_nobody_else_may_read_the_keys(tmp_path):
    made = make_certificates(tmp_path / "new" / "certs", ["device-1", "phone", "device-1"])
    parties = ["ca", "edge", "fed", "device-1", "phone"]
    assert sorted(names(made)) == sorted(f"{party}.{end}" for party in parties for end in ("pem", "key"))
    assert sorted(contents(tmp_path / "new" / "certs")) == sorted(names(made))
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o600 if path.suffix == ".key" else 0o644)


@pytest.mark.parametrize("name", ["edge", "fed", "device-1"])
def test_a_certificate_says_role_and_name_and_what_it_is_for(folder, name):
    found = certificate(folder, name).extensions
    role = name if name in ("edge", "fed") else "device"
    sans = found.get_extension_for_class(x509.SubjectAlternativeName).value
    assert sans.get_values_for_type(x509.UniformResourceIdentifier) == [f"adaptsfl:{role}/{name}"]
    assert sans.get_values_for_type(x509.DNSName) == ([] if role == "device" else [f"{role}.adaptsfl"])
    uses = set(found.get_extension_for_class(x509.ExtendedKeyUsage).value)
    server = set() if role == "device" else {ExtendedKeyUsageOID.SERVER_AUTH}
    assert uses == {ExtendedKeyUsageOID.CLIENT_AUTH} | server
    basic = found.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert not basic.value.ca
    assert isinstance(certificate(folder, name).public_key().curve, ec.SECP256R1)
    key = load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
    assert key.public_key() == certificate(folder, name).public_key()


def test_a_strict_verifier_of_another_hand_accepts_them_for_what_they_are_for(folder):
    policy = PolicyBuilder().store(Store([certificate(folder, "ca")]))
    for role in ("edge", "fed"):
        policy.build_server_verifier(x509.DNSName(f"{role}.adaptsfl")).verify(certificate(folder, role), [])
    for name in ("edge", "fed", "device-1"):
        policy.build_client_verifier().verify(certificate(folder, name), [])
    for role, name in [("fed", "edge"), ("edge", "device-1")]:
        with pytest.raises(VerificationError):
            policy.build_server_verifier(x509.DNSName(f"{role}.adaptsfl")).verify(certificate(folder, name), [])


def test_validity_begins_a_little_before_now_and_lasts_as_asked(tmp_path):
    before = datetime.now(UTC).replace(microsecond=0)
    make_certificates(tmp_path, [], days=7)
    after = datetime.now(UTC)
    edge = certificate(tmp_path, "edge")
    assert before - timedelta(days=1) < edge.not_valid_before_utc < before
    assert before <= edge.not_valid_after_utc - timedelta(days=7) <= after


def test_no_certificate_outlives_its_authority(folder):
    make_certificates(folder, ["device-2"], days=20_000)
    assert certificate(folder, "device-2").not_valid_after_utc == certificate(folder, "ca").not_valid_after_utc


def test_a_second_call_adds_what_is_missing_and_leaves_the_rest_alone(folder):
    before = contents(folder)
    assert names(make_certificates(folder, ["device-1", "device-2"])) == ["device-2.key", "device-2.pem"]
    assert {name: content for name, content in contents(folder).items() if name in before} == before
    certificate(folder, "device-2").verify_directly_issued_by(certificate(folder, "ca"))


def test_with_everything_there_nothing_changes_even_without_the_authoritys_key(folder):
    (folder / "ca.key").unlink()
    (folder / "device-1.key").unlink()  # moved to the device
    before = contents(folder)
    assert make_certificates(folder, ["device-1"]) == []
    assert contents(folder) == before


@pytest.mark.parametrize("party", ["ca", "edge", "device-1"])
def test_a_call_that_was_broken_off_after_a_key_is_finished_with_that_key(folder, party):
    (folder / f"{party}.pem").unlink()
    before = contents(folder)
    assert names(make_certificates(folder, ["device-1"])) == [f"{party}.pem"]
    after = contents(folder)
    assert after.pop(f"{party}.pem")
    assert after == before
    for name in ("edge", "fed", "device-1"):
        certificate(folder, name).verify_directly_issued_by(certificate(folder, "ca"))


def test_renewing_replaces_one_certificate_and_its_key(folder):
    before = contents(folder)
    assert names(renew_certificate(folder, "device-1", days=3)) == ["device-1.key", "device-1.pem"]
    after = contents(folder)
    assert {name for name in before if before[name] != after[name]} == {"device-1.key", "device-1.pem"}
    key = load_pem_private_key(after["device-1.key"], None)
    assert key.public_key() == certificate(folder, "device-1").public_key()
    assert valid_until(folder)["device-1"] < datetime.now(UTC) + timedelta(days=4)


@pytest.mark.parametrize("name", ["nobody", "../certs/device-1", ""])
def test_only_what_is_there_is_renewed(folder, name):
    with pytest.raises(InvalidInput, match=r"no certificate of .* There are: device-1, edge, fed"):
        renew_certificate(folder, name)


def test_the_authority_is_not_renewed_in_place(folder):
    with pytest.raises(InvalidInput, match="new certificates for all: make them in an empty folder"):
        renew_certificate(folder, "ca")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", "ä", "a\n", "a" * 65, "edge", "Fed", "ca", "a.b"])
def test_names_that_no_device_may_have(tmp_path, name):
    with pytest.raises(InvalidInput, match=r"device: cannot be called .* letters, digits, - and _"):
        make_certificates(tmp_path, ["device-1", name])
    assert not contents(tmp_path)


def test_names_that_one_file_system_takes_for_the_same(tmp_path):
    with pytest.raises(InvalidInput, match="'phone' and 'Phone' differ in capital letters only"):
        make_certificates(tmp_path, ["phone", "Phone"])


def test_the_longest_name(tmp_path):
    make_certificates(tmp_path, ["a" * 64])
    assert "a" * 64 in valid_until(tmp_path)


@pytest.mark.parametrize("days", [0, -1, 1.5, 40_000])
def test_days_are_a_sensible_number(tmp_path, days):
    with pytest.raises(InvalidInput, match="days"):
        make_certificates(tmp_path, [], days=days)


def test_certificates_without_their_authority_are_not_mixed_with_those_of_a_new_one(folder):
    (folder / "ca.pem").unlink()
    (folder / "ca.key").unlink()
    before = contents(folder)
    with pytest.raises(InvalidInput, match=r"ca\.pem: is missing, but there are certificates of device-1, edge, fed"):
        make_certificates(folder, ["device-2"])
    assert contents(folder) == before


def test_without_the_authoritys_key_nothing_is_added(folder):
    (folder / "ca.key").unlink()
    with pytest.raises(InvalidInput, match=r"ca\.key: is missing, and without it no certificate can be made"):
        make_certificates(folder, ["device-2"])


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("ca.pem", b"hello", r"ca\.pem: is no PEM certificate"),
        ("ca.key", b"hello", r"ca\.key: is no PEM file with an elliptic-curve key"),
        ("ca.key", "edge.key", r"ca\.key: does not belong to ca\.pem"),
    ],
)
def test_an_authority_that_cannot_be_used(folder, file, content, problem):
    (folder / file).write_bytes(content if isinstance(content, bytes) else (folder / content).read_bytes())
    with pytest.raises(InvalidInput, match=problem):
        make_certificates(folder, ["device-2"])
    assert not (folder / "device-2.key").exists()


def test_an_authority_that_expired(folder, monkeypatch):
    end = certificate(folder, "ca").not_valid_after_utc
    monkeypatch.setattr(certs, "_now", lambda: end + timedelta(days=1))
    with pytest.raises(InvalidInput, match=rf"ca\.pem: expired on {end:%Y-%m-%d}.*empty folder"):
        make_certificates(folder, ["device-2"])


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritten, match="certs: cannot be written"):
        make_certificates(tmp_path / "file" / "certs", [])


def run(*arguments):
    return CliRunner().invoke(app, ["certs", *map(str, arguments)])


def test_the_command_says_what_it_made_and_who_gets_it(tmp_path):
    answer = run(tmp_path, "--devices", 2, "--device", "phone")
    assert answer.exit_code == 0
    for name in ("ca", "edge", "fed", "device-1", "device-2", "phone"):
        assert f"{name}.pem, {name}.key: " in answer.stdout
    assert "its own .pem and .key, and ca.pem" in answer.stdout
    assert "Keep ca.key here" in answer.stdout
    assert sorted(valid_until(tmp_path)) == ["device-1", "device-2", "edge", "fed", "phone"]


def test_the_command_says_that_nothing_changed(folder):
    before = contents(folder)
    answer = run(folder, "--devices", 1)
    assert answer.exit_code == 0
    assert "nothing was changed" in answer.stdout
    assert contents(folder) == before


def test_the_command_renews_and_leaves_what_was_taken_away_where_it_is(folder):
    (folder / "edge.pem").unlink()
    before = (folder / "device-1.pem").read_bytes()
    answer = run(folder, "--renew", "device-1")
    assert answer.exit_code == 0
    assert "device-1.pem, device-1.key: valid until" in answer.stdout
    assert (folder / "device-1.pem").read_bytes() != before
    assert not (folder / "edge.pem").exists()


def test_the_command_says_which_certificates_end_soon(tmp_path, monkeypatch):
    make_certificates(tmp_path, ["late"], days=365)
    renew_certificate(tmp_path, "late", days=5)
    assert "late.pem expires on " in run(tmp_path).stderr
    monkeypatch.setattr(certs, "_now", lambda: datetime.now(UTC) - timedelta(days=10))
    renew_certificate(tmp_path, "late", days=5)
    answer = run(tmp_path)
    assert "late.pem expired on " in answer.stderr
    assert "edge.pem" not in answer.stderr


def test_the_command_explains_its_errors(tmp_path):
    answer = run(tmp_path, "--device", "a b")
    assert answer.exit_code == 1
    assert "error: device: cannot be called 'a b'" in answer.stderr


def test_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "find_spec", lambda name: None)
    answer = run(tmp_path)
    assert answer.exit_code == 1
    assert "certs: needs cryptography. Install it: pip install 'adaptsfl[deploy]'" in answer.stderr


def test_the_command_works_without_torch_and_grpc(tmp_path):
    code = (
        "import sys; sys.modules.update(torch=None, safetensors=None, grpc=None)\nfrom adaptsfl.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "certs", tmp_path, "--devices", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "device-1.pem").exists()
