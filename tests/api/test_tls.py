"""HTTPS with certificates of a private authority, clients' certificates, and files that are none."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from pagedserve.cli import main
from tests.helpers.server import server_process


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    certificate = authority.issue_cert("127.0.0.1")
    paths = {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca")}
    certificate.cert_chain_pems[0].write_to_path(paths["cert"])
    certificate.private_key_pem.write_to_path(paths["key"])
    authority.cert_pem.write_to_path(paths["ca"])
    return paths


def test_only_clients_that_are_known_are_served(
    authority: trustme.CA, files: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    stranger, known = ssl.create_default_context(), ssl.create_default_context()
    for context in (stranger, known):
        authority.configure_trust(context)
    authority.issue_cert("client@example.org").configure_cert(known)
    flags = ("--ssl-certfile", files["cert"], "--ssl-keyfile", files["key"], "--ssl-ca-certs", files["ca"])
    flags += ("--num-device-blocks", "50", "--num-threads", "1", "--served-model-name", "tiny")
    with server_process(tiny_model, *flags, log=tmp_path / "log", tls=known) as server:
        assert server.base_url.startswith("https://")
        assert f"curl {server.base_url}" in server.output
        with (
            httpx.Client(verify=known) as http,
            openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=4, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] is not None
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.base_url}/health", verify=stranger)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.base_url}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.base_url.replace("https", "http") + "/health")
        assert httpx.get(f"{server.base_url}/health", verify=known).status_code == 200


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"keyfile": "key"}, "need --ssl-certfile"),
        ({"ca-certs": "ca"}, "need --ssl-certfile"),
        ({"certfile": "nope"}, "No such file"),
        ({"certfile": "key"}, "--ssl-certfile"),
        ({"certfile": "cert", "keyfile": "cert"}, "--ssl-keyfile"),
        ({"certfile": "cert", "keyfile": "key", "ca-certs": "key"}, "--ssl-ca-certs"),
    ],
    ids=str,
)
def test_files_that_are_wrong_are_one_line(
    flags: dict[str, str], text: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--port", "0"]
    for name, file in flags.items():
        arguments += [f"--ssl-{name}", files.get(file, "/nope")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
