"""Known weaknesses of everything installed in .venv, by pip-audit in an environment of its own.

It asks PyPI's database of advisories over the network. Where that does not answer, this says so and is no failure: exit
status 0. 1: something installed has a known weakness. 2: there is nothing to look at.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv/bin/python"
AUDIT = ROOT / "build/audit"
# An old release whose weaknesses every such database knows: if they are not told, nobody was asked.
KNOWN_WEAK = "https://pypi.org/pypi/jinja2/2.11.2/json"
ANSWER_S = 20
INSTALL_S, AUDIT_S = 300, 300


def main() -> int:
    if not PYTHON.exists():
        print("audit: there is no .venv: make setup", file=sys.stderr)
        return 2
    try:
        ask_for_known_weakness()
        install()
        return audit(installed())
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        print(f"audit: NOT DONE, the database of advisories could not be asked: {e}")
        return 0


def ask_for_known_weakness() -> None:
    """Raises what `main` takes for no answer."""
    with urllib.request.urlopen(KNOWN_WEAK, timeout=ANSWER_S) as answer:
        if not json.load(answer).get("vulnerabilities"):
            raise ValueError("what answers there knows of no weakness that is known")


def install() -> None:
    subprocess.run([PYTHON, "-m", "venv", AUDIT], check=True, capture_output=True, timeout=INSTALL_S)
    command = [AUDIT / "bin/pip", "install", "-qq", "pip-audit>=2.7"]
    subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)


def installed() -> Path:
    """A requirements file of every release in .venv, of pdbus itself not."""
    command = [PYTHON, "-m", "pip", "freeze", "--exclude-editable"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S).stdout
    file = AUDIT / "installed.txt"
    file.write_text("".join(f"{line}\n" for line in said.splitlines() if "==" in line))
    return file


def audit(requirements: Path) -> int:
    """Prints what was found, and what is not known there."""
    report = AUDIT / "report.txt"
    report.unlink(missing_ok=True)
    command = [
        AUDIT / "bin/pip-audit", "--requirement", requirements, "--no-deps", "--disable-pip",
        "--progress-spinner", "off", "--output", report,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S, check=False)
    if done.returncode and not report.exists():
        raise ValueError((done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1])
    print(report.read_text() if report.exists() else done.stderr.strip())
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
