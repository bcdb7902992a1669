"""A template's syntax shows the form in which it expects contents and arguments."""

import pytest

from pagewick.text.template_environment import TemplateEnvironment
from pagewick.text.template_reading import Arguments, TemplateReading

ENVIRONMENT = TemplateEnvironment()


def reading(source: str) -> TemplateReading:
    return TemplateReading.of(ENVIRONMENT.parse(source))


def in_loop(source: str) -> str:
    return f"{{% for m in messages %}}{source}{{% endfor %}}"


@pytest.mark.parametrize(
    ("source", "has_parts"),
    [
        ("{{ m.content }}", False),
        ("{% for line in m.content.split('x') %}{{ line }}{% endfor %}", False),
        ("{{ m.content | trim }}{{ m['content'] | tojson }}{{ 'y' if m.content is iterable }}", False),
        ("{% for p in m['content'] %}{{ p.text }}{% endfor %}", True),
        ("{% for p in m.get('content', []) %}{{ p.text }}{% endfor %}", True),
        ("{% for p in m.content or [] if p.type == 'text' %}{{ p.text }}{% endfor %}", True),
        ("{% for p in m.content[1:] %}{{ p.text }}{% endfor %}", True),
        ("{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}", True),
        ("{% set c = m.content if m.content else [] %}{% set d = c %}{% for p in d %}{{ p.text }}{% endfor %}", True),
        ("{% macro f(x, y) %}{% for p in y %}{{ p.text }}{% endfor %}{% endmacro %}{{ f(1, m.content) }}", True),
        ("{% macro f(y) %}{% for p in y %}{{ p.text }}{% endfor %}{% endmacro %}{{ f(y=m.content) }}", True),
        ("{% macro f(y, x) %}{% for p in y %}{{ p.text }}{% endfor %}{% endmacro %}{{ f(1, m.content) }}", False),
    ],
)
def test_parts(source: str, has_parts: bool) -> None:
    assert reading(in_loop(source)).has_parts is has_parts


LOOP = "{% for p in m['content'] %}{{ p.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "needs_parts"),
    [
        (LOOP, True),
        (f"{{% if m['content'][0]['type'] == 'image' %}}:{{% endif %}}{LOOP}", True),
        (f"{{% if m.content is not none %}}{LOOP}{{% endif %}}", True),
        (f"{{% if m.content is string %}}{{{{ m.content | trim }}}}{{% else %}}{LOOP}{{% endif %}}", False),
        (f"{{% set c = m.content %}}{{% if c is not iterable %}}x{{% else %}}{LOOP}{{% endif %}}", False),
        (f"{{% if m.role == 'system' %}}{{{{ m.content }}}}{{% else %}}{LOOP}{{% endif %}}", False),
        (f"{{% if m.role == 'system' %}}{{{{ m.content | trim }}}}{{% else %}}{LOOP}{{% endif %}}", False),
        (f"{{% if m.role == 'system' %}}{{{{ m.content.strip() }}}}{{% else %}}{LOOP}{{% endif %}}", False),
        (f"{{% set ns = namespace(s=m.content) %}}{{% if m.role == 'user' %}}{LOOP}{{% endif %}}{{{{ ns.s }}}}", False),
        (f"{{% set ns = namespace() %}}{{% set ns.s = m.content %}}{LOOP}{{{{ ns.s }}}}", False),
        (f"{{% if m.role == 'system' %}}{{{{ '%s' % m.content }}}}{{% else %}}{LOOP}{{% endif %}}", False),
        (f"{{% if m.role == 'system' %}}{{{{ '{{}}'.format(m.content) }}}}{{% else %}}{LOOP}{{% endif %}}", False),
        ("{{ m.content }}", False),
        ("{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}", True),
    ],
)
def test_templates_that_know_no_texts(source: str, needs_parts: bool) -> None:
    assert reading(in_loop(source)).needs_parts is needs_parts


@pytest.mark.parametrize(
    ("source", "has_none"),
    [
        ("{{ m.content or '' }}{{ 'x' if m.content }}{{ 'y' if m.content is defined }}", False),
        ("{{ 'x' if m.tool_calls is not none }}{{ m.content }}", False),
        ("{{ 'x' if m['content'] is not none }}", True),
        ("{% set c = m.content %}{{ 'x' if c is none }}", True),
        ("{{ 'x' if m.content == none }}", True),
        ("{{ 'x' if m.content != None }}", True),
    ],
)
def test_none(source: str, has_none: bool) -> None:
    assert reading(in_loop(source)).has_none is has_none


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ m.content }}", Arguments.OBJECT),
        ("{{ m.tool_calls | tojson }}", Arguments.OBJECT),
        ("{{ c.arguments | tojson }}", Arguments.OBJECT),
        ("{{ '(' + c['arguments'] | tojson }}", Arguments.OBJECT),
        ("{% for k, v in c.arguments.items() %}{{ k }}{% endfor %}", Arguments.OBJECT),
        ("{% for k, v in c.arguments | items %}{{ k }}{% endfor %}", Arguments.OBJECT),
        ("{% set a = c.arguments %}{% for k in a %}{{ k ~ a[k] }}{% endfor %}", Arguments.OBJECT),
        ("{{ c.arguments }}", Arguments.TEXT),
        ("{{ '(' ~ c.function['arguments'] ~ ')' }}", Arguments.TEXT),
        ("{% set a = '(' + c.arguments + ')' %}{{ a }}", Arguments.TEXT),
        ("{% set a = c.arguments %}{{ a }}", Arguments.TEXT),
        ("{{ c.arguments if c.arguments is string else c.arguments | tojson }}", Arguments.AS_GIVEN),
        (
            "{% set a = c.arguments %}{% if a is mapping %}{{ a | tojson }}{% else %}{{ a }}{% endif %}",
            Arguments.AS_GIVEN,
        ),
        # A string would be written where pairs belong, as in Gemma 4's template.
        (
            "{% if c.arguments is mapping %}{% for k, v in c.arguments | dictsort %}{{ k ~ v }}{% endfor %}"
            "{% elif c.arguments is string %}{{ c.arguments }}{% endif %}",
            Arguments.OBJECT,
        ),
        (
            "{% if c.arguments is not string %}{% for k in c.arguments.items() %}{{ k }}{% endfor %}{% endif %}",
            Arguments.OBJECT,
        ),
    ],
)
def test_arguments(source: str, form: Arguments) -> None:
    assert reading(in_loop(source)).arguments is form
