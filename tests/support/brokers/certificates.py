"""Certificates made for a test: what a relay in front of a server that has no TLS shows (`Relay(port, tls=...)`).

The bundled broker is built without TLS. In production its place is taken by a broker with TLS, or by such a relay
(stunnel, HAProxy, a service mesh); the client's end is the same.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as PEM files, and the authority that signed it."""

    pem: Path
    key: Path
    authority: Path

    def context(self) -> ssl.SSLContext:
        """What a server shows this certificate with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.pem, self.key)
        return context


def make_certificate(directory: Path, name: str, *, authority: str = "ca") -> Certificate:
    """A certificate for a host name or address, signed by an authority that is made when it is first named."""
    ca, ca_key = directory / f"{authority}.pem", directory / f"{authority}.key"
    if not ca.exists():
        usage = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl("req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={authority}", *usage, "-keyout", ca_key, "-out", ca)
    stem = directory / f"{name.replace(':', '-')}-by-{authority}"
    pem, key, request, extensions = (stem.with_suffix(end) for end in (".pem", ".key", ".csr", ".ext"))
    kind = "IP" if name[0].isdigit() else "DNS"
    extensions.write_text(
        f"subjectAltName={kind}:{name}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    _openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    signing = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
    _openssl("x509", "-req", "-in", request, *signing, "-out", pem)
    return Certificate(pem, key, ca)


def _openssl(*words: str | Path) -> None:
    program = shutil.which("openssl")
    assert program, "the tests of TLS make their certificates with openssl, which is not installed: install it"
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
