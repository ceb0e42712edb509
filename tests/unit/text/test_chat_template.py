from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError, InvalidRequest
from shared.text import chat_template
from shared.text.chat_template import ChatTemplate, load_chat_template

USER = [{"role": "user", "content": "hi"}]


def test_special_tokens_and_the_generation_prompt_are_given_to_it() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(USER) == "<s>hiTrue"
    assert template.render(USER, add_generation_prompt=False) == "<s>hiFalse"


def test_the_usual_helpers_exist() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}!{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([{"role": "é", "content": "<"}]) == '{"role": "é", "content": "<"}'


def test_today_is_known_only_when_injected() -> None:
    source = "{{ strftime_now('%Y') if strftime_now is defined else 'fixed' }}"
    assert ChatTemplate(source, {}).render(USER) == "fixed"
    assert ChatTemplate(source, {}, strftime_now=lambda _: "2031").render(USER) == "2031"


def test_its_own_complaint_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[5].content }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_failing_template_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(USER)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_CHARS", 100)
    template = ChatTemplate("{% for i in range(90) %}{{ 'ab' }}{% endfor %}", {})
    with pytest.raises(InvalidRequest):
        template.render(USER)
    content = "x" * 5000
    assert (
        ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": content}])
        == content
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_hostile_template_is_refused_at_load(source: str) -> None:
    with pytest.raises(ConfigError):
        ChatTemplate(source, {})


def test_a_name_built_at_run_time_does_not_escape_either() -> None:
    template = ChatTemplate("{{ messages['_' ~ '_class__']() }}", {})
    with pytest.raises(InvalidRequest):
        template.render(USER)


PARTS = (
    "{% for m in messages %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (PARTS, True),
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", False),
    ],
)
def test_it_is_known_whether_content_comes_in_parts(source: str, takes_parts: bool) -> None:
    assert ChatTemplate(source, {}).takes_parts is takes_parts


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("chat_template.jinja", b"caf\xe9", "chat_template.jinja is not UTF-8"),
        ("chat_template.jinja", b"", "chat_template.jinja: the chat template is empty"),
        ("chat_template.jinja", b"\n{% if %}", r"chat_template.jinja: .* does not compile \(line 2: "),
        ("tokenizer_config.json", b"caf\xe9", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b'{"chat_template": " "}', "tokenizer_config.json: .* is empty"),
    ],
)
def test_an_unusable_template_names_its_file(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_chat_template(tmp_path, {})


def test_a_template_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        load_chat_template(tmp_path, {})


def test_a_list_of_templates_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": ["x", {"name": "other"}]}))
    assert load_chat_template(tmp_path, {}) is None


def test_a_template_that_renders_nothing_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest, match="the chat template renders nothing"):
        ChatTemplate("{% for m in messages if m.role == 'nobody' %}x{% endfor %}", {}).render(USER)


def test_where_a_directory_keeps_its_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "named"}]}))
    named = load_chat_template(tmp_path, {})
    config.write_text(json.dumps({"chat_template": "configured"}))
    configured = load_chat_template(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text("file")
    file = load_chat_template(tmp_path, {})
    assert [t.source for t in (named, configured, file) if t] == ["named", "configured", "file"]
