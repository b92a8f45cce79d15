"""Prints the table of settings in operating.md: `python docs/settings.py`. A test compares the two."""

from __future__ import annotations

from pdbus.nodes.config import SETTINGS, Setting


def row(setting: Setting) -> str:
    """Option with its metavar, default, meaning. Variable and key follow from the option."""
    option = f"`{setting.option}`" if setting.is_switch else f"`{setting.option} {setting.metavar}`"
    return f"| {option} | {default(setting)} | {setting.help} |"


def default(setting: Setting) -> str:
    if setting.shown_default is not None:
        return setting.shown_default
    if setting.is_switch:
        return "off"
    if callable(setting.default):
        return "needed"
    shown = "" if setting.is_list else str(setting.default)
    return f"`{shown}`" if shown else "none"


def table() -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    panel = ""
    for setting in SETTINGS:
        if setting.panel != panel:
            panel = setting.panel
            lines.append(f"| **{panel}** | | |")
        lines.append(row(setting))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
