"""TLS for HTTP: what is wrong with the two files is one line that names the option and the file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.children import HttpServer
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.config import load
from pdbus.nodes.http.listening import HttpArgs
from pdbus.nodes.http.server import serve
from pdbus.nodes.http.tls import Tls

from tests.certificates import Files, certificate, openssl


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return certificate(tmp_path_factory.mktemp("tls"))


def problem_of(cert: Path | str, key: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        Tls(str(cert), str(key)).check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_certificate_and_its_key_are_good(files: Files) -> None:
    assert Tls(str(files.cert), str(files.key)).check().scheme == "https"
    assert Tls().check().scheme == "http"


def test_one_without_the_other_is_named(files: Files) -> None:
    assert problem_of(files.cert, "") == "--http-tls-cert: needs --http-tls-key FILE, its private key"
    assert problem_of("", files.key) == "--http-tls-key: needs --http-tls-cert FILE, its certificate"


def test_a_missing_file_is_named(files: Files, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert problem_of(gone, files.key) == f"--http-tls-cert: cannot read {gone}: No such file or directory"
    assert problem_of(files.cert, gone) == f"--http-tls-key: cannot read {gone}: No such file or directory"


def test_a_folder_or_a_pipe_is_no_file(files: Files, tmp_path: Path) -> None:
    assert problem_of(tmp_path, files.key) == f"--http-tls-cert: {tmp_path} is no regular file"


def test_a_key_that_others_can_read_is_refused(files: Files, tmp_path: Path) -> None:
    key = tmp_path / "open.key"
    key.write_text(files.key.read_text())
    key.chmod(0o644)
    assert problem_of(files.cert, key) == f"--http-tls-key: others have access to {key}, mode 644: chmod 600 {key}"


def test_the_key_of_another_certificate_is_named(files: Files, tmp_path: Path) -> None:
    other = certificate(tmp_path, "other")
    said = problem_of(files.cert, other.key)
    assert said == f"--http-tls-key: {other.key} is not the key of the certificate in {files.cert}"


def test_swapped_files_are_told(files: Files, tmp_path: Path) -> None:
    assert problem_of(files.key, files.key) == f"--http-tls-cert: {files.key} holds no certificate in PEM form"
    copy = tmp_path / "cert.pem"
    copy.write_text(files.cert.read_text())
    copy.chmod(0o600)
    assert problem_of(files.cert, copy) == f"--http-tls-key: {copy} holds no private key in PEM form"


def test_a_damaged_certificate_is_told(files: Files, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("-----BEGIN CERTIFICATE-----\nbm90IG9uZQ==\n-----END CERTIFICATE-----\n")
    assert problem_of(bad, files.key).startswith(f"--http-tls-cert: {bad} and {files.key} cannot be used: ")


def test_a_key_with_a_passphrase_is_not_asked_for(files: Files, tmp_path: Path) -> None:
    """OpenSSL would wait for it on the terminal, once for every start."""
    locked = tmp_path / "locked.key"
    openssl("pkey", "-in", str(files.key), "-aes256", "-passout", "pass:secret", "-out", str(locked))
    locked.chmod(0o600)
    assert problem_of(files.cert, locked) == f"--http-tls-key: {locked} is encrypted: give it without a passphrase"


def test_files_that_have_changed_are_one_line_when_http_starts_again(files: Files, tmp_path: Path) -> None:
    """The process is started anew when it has ended, maybe years after the node."""
    args = HttpArgs(bus="tcp://127.0.0.1:1", fd=0, tls_cert=str(files.cert), tls_key=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="--http-tls-key: cannot read"):
        asyncio.run(serve(args))


def test_a_node_tells_others_https(files: Files) -> None:
    settings = {"engine": "coded", "http_port": "0", "http_tls_cert": str(files.cert), "http_tls_key": str(files.key)}
    server = HttpServer(load(settings), "tcp://127.0.0.1:7400")
    assert server.url.startswith("https://127.0.0.1:")
    server._socket.close()


def test_a_cluster_asks_its_nodes_and_its_gateway_over_tls(files: Files) -> None:
    options = {"engine": "coded", "http_tls_cert": str(files.cert), "http_tls_key": str(files.key)}
    cluster = Cluster(1, 1, options=options, gateway_port=8000)
    assert cluster.decode[0].http.startswith("https://") and cluster.gateway[0].http.startswith("https://")
    words = cluster.gateway[0].command
    assert words[words.index("--http-tls-key") + 1] == str(files.key)
