"""The certificate that HTTP shows, and its key. Light: control checks them too, so that one line says what is wrong."""

from __future__ import annotations

import ssl
from typing import NamedTuple

from pdbus.bus.errors import ConfigError
from pdbus.bus.key_folder import check_private, read_text

CERT, KEY = "--http-tls-cert", "--http-tls-key"
PEM_BYTES_MAX = 1 << 20  # a chain has some KiB


class Tls(NamedTuple):
    """Two PEM files; '' and '': HTTP in clear."""

    cert: str = ""  # the certificate, then those that lead to one that clients know
    key: str = ""

    @property
    def scheme(self) -> str:
        return "https" if self.cert else "http"

    def check(self) -> Tls:
        """Raises ConfigError naming the option at fault."""
        if not self.cert and not self.key:
            return self
        for given, missing, what in ((self.cert, CERT, "its certificate"), (self.key, KEY, "its private key")):
            if not given:
                raise ConfigError(KEY if missing == CERT else CERT, f"needs {missing} FILE, {what}")
        cert = read_text(self.cert, PEM_BYTES_MAX, CERT)
        check_private(self.key, KEY)
        key = read_text(self.key, PEM_BYTES_MAX, KEY)
        if "-----BEGIN CERTIFICATE-----" not in cert:
            raise ConfigError(CERT, f"{self.cert} holds no certificate in PEM form")
        if "PRIVATE KEY-----" not in key:
            raise ConfigError(KEY, f"{self.key} holds no private key in PEM form")
        self._try()
        return self

    def _try(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, _passphrase)
        except _Encrypted:
            raise ConfigError(KEY, f"{self.key} is encrypted: give it without a passphrase") from None
        except ssl.SSLError as e:
            if e.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(KEY, f"{self.key} is not the key of the certificate in {self.cert}") from None
            problem = f"{self.cert} and {self.key} cannot be used: {e.reason or e}"
            raise ConfigError(CERT, problem) from None


CLEAR = Tls()


class _Encrypted(Exception):
    pass


def _passphrase() -> str:
    """OpenSSL would ask for it on the terminal."""
    raise _Encrypted
