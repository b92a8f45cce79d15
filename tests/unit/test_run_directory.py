"""A control process's folder goes with it, even when it was killed."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from pdbus.connector.run_directory import RunDirectory

HOLD = """
import sys
from pdbus.connector.run_directory import RunDirectory
made = RunDirectory(sys.argv[1])
print(made.path, flush=True)
sys.stdin.read()
"""


def test_only_its_owner_may_enter_and_close_removes_it(tmp_path: Path) -> None:
    made = RunDirectory(str(tmp_path))
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    made.close()
    assert not made.path.exists()


def test_a_killed_owners_folder_goes_with_the_next_start_and_a_living_ones_stays(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        living = RunDirectory(str(tmp_path))
        assert left.exists()
        owner.kill()
        owner.wait()
        RunDirectory(str(tmp_path)).close()
        assert not left.exists()
        assert living.path.exists()
        living.close()


def test_a_folder_without_a_lock_is_not_ours_to_remove(tmp_path: Path) -> None:
    other = tmp_path / "pdbus-other"
    other.mkdir()
    RunDirectory(str(tmp_path)).close()
    assert other.exists()
