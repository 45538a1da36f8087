"""Hostile templates: endless, huge, or looking for a way out (C106)."""

from __future__ import annotations

import threading

import pytest

from pagedserve.engine import template_sandbox
from pagedserve.errors import RequestError
from tests.helpers.chat_templates import (
    CONVERSATIONS,
    EVERYTHING,
    template,
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) recursive %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    ],
)
def test_c106_endless_templates_are_cut_off(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"took more than 0\.2 s"):
        template(source).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' * 10 ** 9 }}", "repetition"),
        ("{{ 10 ** 9 * ['a'] }}", "repetition"),
        ("{{ 9 ** 99999 }}", "power"),
        ("{{ range(10 ** 7) | list }}", "Range too big"),
        (
            "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "built a text",
        ),
        (
            "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "built a text",
        ),
        ("{% for i in range(99) %}{{ 'a' * 1000000 }}{% endfor %}", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply nested"),
    ],
)
def test_c106_large_results_are_cut_off(source, message):
    with pytest.raises(RequestError, match=message):
        template(source).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ dict.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_c106_the_sandbox_holds(source):
    with pytest.raises(RequestError):
        template(source).render(CONVERSATIONS[0])


def test_rendering_in_many_threads():
    """The budget of one rendering is no other's."""
    chat, results = template(EVERYTHING), []
    expected = [chat.render(messages) for messages in CONVERSATIONS]

    def work():
        results.append([chat.render(messages) for messages in CONVERSATIONS for _ in range(20)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[text for text in expected for _ in range(20)]] * 8
