"""Chat templates: Jinja programs that come with a model, run in a sandbox with what they are used to finding there."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pdbus.bus.errors import ConfigError


class Template(NamedTuple):
    render: Callable[..., str]  # of its variables
    takes_tools: bool  # it does something with the variable `tools`


def compile_template(source: str) -> Template:
    """Raises ConfigError naming `--model` when it is no template."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return Template(environment.from_string(source).render, "tools" in used)
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError("--model", f"its chat template is broken at line {e.lineno}: {e.message}") from None


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on; here it is its contents."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """How a template says that it cannot render a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """The local date, which some templates write into the system message."""
    return datetime.now().strftime(form)
