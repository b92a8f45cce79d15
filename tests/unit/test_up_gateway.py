"""What `pd up` tells the gateway that it starts: it must be as strict as the nodes behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.nodes.cluster import Cluster
from pdbus.nodes.config import load
from pdbus.nodes.up import for_all


def gateways_words(options: dict[str, str], file: Path | None, environ: dict[str, str]) -> str:
    chosen = load({"engine": "coded", **options}, environ, file=file)
    cluster = Cluster(1, 1, options=for_all({"engine": "coded", **options}, chosen), gateway_port=1)
    (gateway,) = cluster.gateway
    return " ".join(gateway.command)


@pytest.mark.parametrize("said", ["option", "variable", "file"])
def test_a_gateway_asks_for_the_keys_of_its_nodes_wherever_they_are_said(said: str, tmp_path: Path) -> None:
    """Said in the file of --config they were the nodes' alone: who asked the gateway needed none."""
    file = tmp_path / "c.toml"
    file.write_text('http_keys = "keys.txt"\nrequest_deadline = "1h"\n' if said == "file" else "")
    both = {"http_keys": "keys.txt", "request_deadline": "1h"}
    words = gateways_words(
        both if said == "option" else {},
        file,
        {f"PD_{name.upper()}": value for name, value in both.items()} if said == "variable" else {},
    )
    assert "--http-keys keys.txt" in words
    assert "--request-deadline 1h" in words
