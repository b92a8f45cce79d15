"""`pd doctor` on this machine: a real read between two movers, and what a wrong setting looks like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.live


def doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("pd")), "doctor", *options]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


def by_name(findings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {finding["what"]: finding for finding in findings}


def test_a_machine_that_is_well() -> None:
    ran = doctor("--json")
    told = json.loads(ran.stdout)
    assert ran.returncode == 0 and told["ok"]
    assert told["nixl"]["version"] and told["nixl"]["ucx"] and told["nixl"]["transports"]
    assert "every byte right" in by_name(told["findings"])["self-read"]["found"]


def test_the_transport_asked_for_is_the_one_used() -> None:
    told = json.loads(doctor("--json", UCX_TLS="tcp", UCX_NET_DEVICES="lo").stdout)
    assert told["nixl"]["transports"] == ["tcp/lo"]
    assert by_name(told["findings"])["UCX and NIXL variables"]["found"] == "UCX_TLS=tcp, UCX_NET_DEVICES=lo"


def test_a_transport_that_is_not_there_is_a_problem_that_names_the_variable() -> None:
    ran = doctor(UCX_TLS="rc")
    assert ran.returncode == 1
    assert "problem  self-read" in ran.stdout and "UCX_TLS" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
