"""Chat templates: Hugging Face's dialect, nothing that reaches Python, and every failure a typed error."""

from datetime import datetime

import pytest

from batchgen.errors import RequestError
from batchgen.text import chat_template
from batchgen.text.chat_template import ChatTemplate, check_messages, map_strings

USER = [{"role": "user", "content": "hi", "tags": ["a", "b"]}]


def render(source: str, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 1, 2)).render(USER, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m.content }}{% endfor %}", "<s>user: hi"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{{ {'k': '<é>'} | tojson }}", '{"k": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{% generation %}{{ 'x' * 3 }}{% endgeneration %}", "xxx"),
        ("    {% if true %}\n  a\n    {% endif %}\nb", "  a\nb"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n % 2 }}", "1"),
        ("{{ missing }}{{ 'yes' if enable_thinking is defined and enable_thinking }}", "yes"),
        ("{{ '%s-%d' % ('a', 3) }}{{ 'a.b'.split('.')[-1].replace('b', 'c') }}{{ '{}!'.format('x') }}", "a-3cx!"),
        ("{{ ['a', 'b'] | join('-') }}{{ 'ab' | replace('a', 'c') }}{{ '%s' | format('x') }}", "a-bcbx"),
        ("{% if tools %}{{ tools[0].name }}{% endif %}{% if add_generation_prompt %}>{% endif %}", "t>"),
    ],
)
def test_templates_speak_the_dialect_of_hugging_face(source, expected):
    assert render(source, tools=[{"name": "t"}], variables={"enable_thinking": True}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}{{ ''.__class__ }}{{ (''|attr('__class__')).mro() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format('') }}{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].tags.clear() }}",
        "{{ messages | map(attribute='__class__') | list }}{{ messages[0].__class__.x }}",
    ],
)
def test_attacks_are_refused_and_messages_stay_as_they_are(source):
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "chat_template"
    assert USER == [{"role": "user", "content": "hi", "tags": ["a", "b"]}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'a'.center(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a' | indent(999999999) }}",
        "{{ range(999999999) | list }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
        "{{ ('b' * 99999).join(['a'] * 99999) }}",
        "{{ (['a'] * 99999) | join('b' * 99999) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    ],
)
def test_output_and_single_operations_are_bounded(source):
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "chat_template"


def test_the_longest_output_is_the_limit(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 10)
    assert render("{% for i in '0123456789' %}x{% endfor %}") == "x" * 10
    with pytest.raises(RequestError, match="more than 10 characters"):
        render("{% for i in '0123456789!' %}x{% endfor %}")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{{ messages[0].content.nope() }}", "{{ a.b }}"]
)
def test_a_template_that_fails_is_a_request_error(source):
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "chat_template"


def test_a_templates_own_message_reaches_the_user():
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("messages", [None, [], "hi", {"role": "user"}, ["hi"], [{}], [{"role": 3}], [{"content": "x"}]])
def test_messages_without_a_role_are_refused(messages):
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert caught.value.code == "invalid_messages"


def test_messages_are_copied_as_plain_data_and_anything_else_is_refused():
    value = {"a": [1, 2.5, None, True, ("x",)]}
    copy = map_strings(value, str.upper)
    assert copy == {"A": [1, 2.5, None, True, ["X"]]}
    for bad in ({1: "x"}, [object()], [b"x"], {"a": {1, 2}}):
        with pytest.raises(RequestError):
            map_strings(bad, str)


def test_nesting_at_the_limit_passes_and_one_deeper_is_refused():
    def nest(depth: int) -> list:
        return [nest(depth - 1)] if depth else []

    map_strings(nest(chat_template.MAX_DEPTH), str)
    with pytest.raises(RequestError):
        map_strings(nest(chat_template.MAX_DEPTH + 1), str)
