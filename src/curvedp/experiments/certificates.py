"""Keys and certificates of a federation: who is the server, and who is which client."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvedp.errors import ConfigurationError, missing_extra
from curvedp.storage import make_folder

__all__ = ["make_keys", "refuse_unnamed"]

_DAYS = 365


def make_keys(folder: Path, clients: int, hosts: Sequence[str]) -> None:
    """A certificate authority, the server's certificate, and a key for each client.

    ``ca.crt`` goes to everybody; ``server.key`` stays on the server; ``client-3.key``
    goes to client 3 alone, and its public half ``client-3.pub`` to the server.

    Args:
        folder: made anew; never one that exists.
        clients: how many.
        hosts: names and addresses of the server.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise missing_extra("cryptography", "secure") from None
    if folder.exists():
        raise ConfigurationError(
            f"{folder} exists already, and keys are never overwritten",
            "name a folder that does not exist",
        )
    if clients < 1:
        raise ConfigurationError(f"keys for {clients} clients", "give 1 or more")
    names = x509.SubjectAlternativeName([_alternative(x509, host) for host in hosts])
    make_folder(folder)
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()

    def new_key(name: str, kind: Any = serialization.PrivateFormat.PKCS8) -> Any:
        key = ec.generate_private_key(ec.SECP384R1())
        path = folder / f"{name}.key"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(key.private_bytes(encoding, kind, plain))
        return key

    def name_of(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(key: Any, name: Any, *extensions: Any) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(root, hashes.SHA256()).public_bytes(encoding)

    authority = name_of("curvedp federation")
    root = new_key("ca")
    root_id = x509.SubjectKeyIdentifier.from_public_key(root.public_key())
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True,
        crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "ca.crt").write_bytes(
        certificate(
            root, authority, (constraints, True), (usage, True), (root_id, False)
        )
    )
    server = new_key("server")
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
    (folder / "server.crt").write_bytes(
        certificate(server, name_of(hosts[0]), (names, False), (issued_by, False))
    )
    for number in range(clients):
        secret = new_key(f"client-{number}", serialization.PrivateFormat.OpenSSH)
        public, kind = secret.public_key(), serialization.PublicFormat.OpenSSH
        text = public.public_bytes(serialization.Encoding.OpenSSH, kind)
        (folder / f"client-{number}.pub").write_bytes(text + b"\n")


def _alternative(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigurationError(
            f"{host!r} cannot stand in a certificate",
            "give the name in ASCII: names with other letters have a form that begins "
            "with xn--",
        ) from None


def refuse_unnamed(keys: Path, host: str) -> None:
    """Refuse a certificate that does not name the host that it is shown for.

    Connections to it would fail one after the other, and say no reason.
    """
    from cryptography import x509

    try:
        content = (keys / "server.crt").read_bytes()
        found = x509.load_pem_x509_certificate(content).extensions
        named = found.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        raise ConfigurationError(
            f"{keys / 'server.crt'} is missing or no certificate with names",
            "make keys with: curvedp federated keys keys --clients 4",
        ) from None
    names = {str(n) for n in named.get_values_for_type(x509.DNSName)}
    names |= {str(n) for n in named.get_values_for_type(x509.IPAddress)}
    if host not in names:
        raise ConfigurationError(
            f"the server's certificate does not name {host}, but "
            f"{', '.join(sorted(names))}",
            f"make keys with --host {host}, or listen on all addresses: 0.0.0.0",
        )
