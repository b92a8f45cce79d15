"""`pd demo` itself: two nodes, an incident, one node, a recording that verifies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.models.demo import fetch_demo_model

pytestmark = [pytest.mark.live, pytest.mark.model, pytest.mark.long, pytest.mark.timeout(400)]


def test_the_demo_holds_what_it_promises() -> None:
    try:
        fetch_demo_model()
    except ConfigError as e:
        if "cannot fetch" in str(e):
            pytest.skip(str(e))
        raise
    ran = subprocess.run([Path(sys.executable).with_name("pd"), "demo"], capture_output=True, text=True)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert "FAILED" not in said and "kill -9 prefill-1" in said and "no divergence, no violation" in said
