"""Renders messages with a model's own chat template: owns the sandbox; not tokens or media.

The template comes with the model's files, so it is code of a stranger: it runs in an immutable
sandbox, private attributes are refused at load, and its output is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, InvalidRequest

#: Most characters that a template may write beyond the content it was given.
MAX_TEMPLATE_CHARS = 1 << 20

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationTag(Extension):
    """``{% generation %}`` marks an assistant's words for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. ``takes_parts``: it wants message content as a list of parts rather than
    a string. Immutable; safe in any thread."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        strftime_now: Callable[[str], str] | None = None,
    ) -> None:
        """``strftime_now`` tells templates today's date; without it they take their fixed one, so that
        prompts stay equal from day to day. Raises ConfigError when ``source`` does not compile or
        reaches for private attributes, or is empty."""
        if not source.strip():
            raise ConfigError("the chat template is empty")
        self.source = source
        self._variables: dict[str, Any] = dict(variables)
        if strftime_now is not None:
            self._variables["strftime_now"] = strftime_now
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template does not compile{_where(error)}") from error
        _refuse_private_names(tree)
        self.takes_parts = self._probe_parts()

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text, never empty. Raises InvalidRequest when the template refuses the messages."""
        limit = MAX_TEMPLATE_CHARS + sum(_content_chars(m.get("content")) for m in messages)
        try:
            text = self._render(messages, add_generation_prompt, limit)
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses: {error}"[:300], param="messages") from error
        except _RENDER_ERRORS as error:
            raise InvalidRequest("the chat template cannot render the messages", param="messages") from error
        if not text:
            raise InvalidRequest("the chat template renders nothing", param="messages")
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, limit: int) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        ):
            size += len(piece)
            if size > limit:
                raise OverflowError("the template's output is too long")
            pieces.append(piece)
        return "".join(pieces)

    def _probe_parts(self) -> bool:
        """Whether a list of parts comes out as its text; a string template fails on it or prints the list."""
        message = {"role": "user", "content": [{"type": "text", "text": "probe"}]}
        try:
            text = self._render([message], True, MAX_TEMPLATE_CHARS)
        except (_Refused, *_RENDER_ERRORS):
            return False
        return "probe" in text and "'text'" not in text and '"text"' not in text


def load_chat_template(model_dir: Path, variables: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a model directory: chat_template.jinja, else the one in tokenizer_config.json.
    None when the model has none. Raises ConfigError that names the file when it is unusable."""
    file = model_dir / "chat_template.jinja"
    try:
        source: object = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        file = model_dir / "tokenizer_config.json"
        source = _configured_template(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.name} is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read") from error
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, variables)
    except ConfigError as error:
        raise ConfigError(f"{file.name}: {error.message}") from error


def _configured_template(file: Path) -> object:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read") from error
    except ValueError as error:
        raise ConfigError(f"{file.name} is not JSON") from error
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):  # several named templates
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        return named[0].get("template") if named else None
    return template


def _where(error: Exception) -> str:
    """What a syntax error says of itself."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f" (line {error.lineno}: {error.message})"
    return ""


class _Refused(Exception):
    """The template's own complaint, by ``raise_exception``."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.filters.pop("attr")
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _refuse_private_names(tree: nodes.Template) -> None:
    names: list[object] = [node.attr for node in tree.find_all(nodes.Getattr)]
    names += [node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)]
    if any(isinstance(name, str) and name.startswith("_") for name in names):
        raise ConfigError("the chat template reaches for private attributes")


def _content_chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(len(part.get("text", "")) for part in content)
    return 0
