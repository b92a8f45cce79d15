"""Command-line options out of the table of settings, so that an option, a variable and a key cannot differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import SETTINGS, Setting

Command = Callable[..., None]


def group(help: str) -> typer.Typer:
    """An app whose commands are added to it."""
    return typer.Typer(help=help, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


def takes_settings(settings: Sequence[Setting] = SETTINGS) -> Callable[[Command], Command]:
    """Gives a command an option for every setting, beside its own parameters. They reach it as `settings`: the text
    of those that were given, by name."""
    names = [setting.name for setting in settings]

    def decorate(command: Command) -> Command:
        def with_options(**arguments: Any) -> None:
            given = {name: _text(arguments.pop(name)) for name in names}
            command(**arguments, settings={name: text for name, text in given.items() if text is not None})

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        parameters = own + [_parameter(setting) for setting in settings]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
        return with_options

    return decorate


def _parameter(setting: Setting) -> inspect.Parameter:
    option = typer.Option(
        f"{setting.option}/--no-{setting.option[2:]}" if setting.is_switch else setting.option,
        metavar=setting.metavar or None,
        help=_help(setting),
        rich_help_panel=setting.panel,
        show_default=False,
    )
    kind: Any = bool if setting.is_switch else list[str] if setting.is_list else str
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _help(setting: Setting) -> str:
    shown = setting.shown_default or ("" if callable(setting.default) else str(setting.default))
    plain = setting.is_switch or setting.is_list or shown in ("", "0", "0.0")
    return setting.help if plain else f"{setting.help} [dim]\\[{shown}][/dim]"


def _text(value: Any) -> str | None:
    if value is None or value == []:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, list) else str(value)


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE.toml", help="Settings as keys, at the top or under \\[node].", envvar="PD_CONFIG"
    ),
]
Keys = Annotated[
    str, typer.Option("--keys", metavar="DIR", help="Folder of keys, or one NAME.key in it.", envvar="PD_KEYS")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
