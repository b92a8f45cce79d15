"""How tests are spread over processes: a file stays together, for its tests share a cluster."""

from __future__ import annotations

import pytest

# Their nodes look for the first free ports from the default ones on, as anybody's do: not two at once.
OF_DEFAULT_PORTS = ("test_bad_settings", "test_cli", "test_docs", "test_up")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.path.stem
        item.add_marker(pytest.mark.xdist_group("default ports" if name in OF_DEFAULT_PORTS else name))
