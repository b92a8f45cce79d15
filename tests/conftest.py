"""How tests are spread over processes: a file stays together, for its tests share a cluster."""

from __future__ import annotations

import pytest

# Their nodes look for the first free ports from the default ones on, as anybody's do: not two at once.
OF_DEFAULT_PORTS = ("test_bad_settings", "test_cli", "test_docs", "test_up")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        name = item.path.stem
        item.add_marker(pytest.mark.xdist_group("default ports" if name in OF_DEFAULT_PORTS else name))
