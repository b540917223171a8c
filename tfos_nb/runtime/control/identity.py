"""Key and certificate that a cluster makes for its own lifetime."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

__all__ = ["SERVER_NAME", "Identity"]

SERVER_NAME = "tfos-nb"
"""The name in every certificate. Clients pin the certificate itself, so the name only has to be the same."""

_LIFETIME = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Identity:
    """A private key and its self-signed certificate, both PEM. Neither is in the repr."""

    key: bytes = field(repr=False)
    certificate: bytes = field(repr=False)

    @classmethod
    def create(cls) -> Identity:
        """Make a new one (elliptic curve P-256, some milliseconds)."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SERVER_NAME)])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # executors' clocks may be behind
            .not_valid_after(now + _LIFETIME)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            certificate.public_bytes(serialization.Encoding.PEM),
        )
