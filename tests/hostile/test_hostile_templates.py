"""Chat templates of strangers: none leaves the sandbox, and each ends within seconds and a bounded memory, with a text or one line."""

import os
import resource
from pathlib import Path

import pytest
from hostile import assert_lines, watched

from jgt.document import InputError
from train.data.chat import template
from train.data.chat.template import ChatTemplate

pytest.importorskip("jinja2")


def nested(block, end, times):
    return block * times + "x" + end * times


# Some need too much of something: the answer is one line.
REFUSED = {
    "25 nested loops": nested("{% for a in [1] %}", "{% endfor %}", 25),
    "120 nested ifs": nested("{% if true %}", "{% endif %}", 120),
    "a deep negation": "{{ " + "not " * 5000 + "x }}",
    "a long sum": "{{ " + "+".join(["a"] * 20_000) + " }}",
    "two loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "three loops that write": "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages }}{% endfor %}{% endfor %}",
    "a power while compiling": "{{ 10 ** (10 ** 8) }}",
    "a power": "{% set n = messages|length %}{% set k = (n + 9) ** ((n + 9) ** 8) %}x",
    "many digits": "{{ 10 ** 5000 }}",
    "many digits later": "{{ (messages|length + 9) ** 5000 }}",
    "a product of a text": "{{ ('a' * 1000000000000)|length }}",
    "a product of a text later": "{{ ('a' * (messages|length) * 4000000000)|length }}",
    "a product of a list": "{{ ([0] * (messages|length) * 2000000000)|length }}",
    "a long constant": "{{ 'ab' * 30000000 }}",
    "a wide number": "{{ '%2000000000d' % 1 }}",
    "a wide format": "{{ '{:>2000000000}'.format(messages|length) }}",
    "center": "{{ 'a'|center(2000000000 * messages|length) }}",
    "ljust": "{{ 'a'.ljust(2000000000 * messages|length)|length }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "replace": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}{{ n.x }}",
    "replace filters": "{{ 'aa'" + "|replace('a', 'aa')" * 60 + "|length }}",
    "wordwrap": "{{ ('a ' * 30000000)|wordwrap(1)|length }}",
    "a deep list": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "join": "{{ range(99999)|map('string')|join('x' * 100000)|length }}",
    "half a pair": "{{ '\\ud800' }}",
    "the classes": "{{ messages.__class__.__mro__ }}",
    "a class by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a program": "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "a pipe": "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
    "self": "{{ self.__init__.__globals__.os }}",
    "joiner": "{{ joiner.__init__.__globals__.os }}",
    "the mark": "{{ generation_block.__globals__.sys }}",
    "the mark's cell": "{{ generation_block.__closure__[0].cell_contents }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "many parentheses": "{{ " + "(" * 100 + "1" + ")" * 100 + " }}",
    "classes of a map": "{{ messages|map(attribute='__class__.__mro__')|list }}",
    "an unknown filter": "{{ messages|nope }}",
    "an unknown function": "{{ nope() }}",
    "a wrong type": "{{ messages + 1 }}",
    "an attribute of the request": "{{ messages.append(1) }}",
}
# These do no harm.
WRITTEN = {
    "a class by a filter": "{{ messages|attr('__class__')|list }}",
    "a class by format_map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "strftime": "{{ strftime_now.__self__.__class__.__module__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "a wide date": "{{ strftime_now('%999d')|length }}",
    "a date with a zero byte": "{{ strftime_now('%Y\\u0000%')|length }}",
    "urlize": "{{ ('http://a.b/' * 2000)|urlize|length }}",
    "striptags": "{{ ('<' * 20000)|striptags|length }}",
    "a class of a group": "{{ messages|groupby('role.__class__')|list }}",
}
CHAT = [{"role": "user", "content": "Hello"}]


def cost():
    """The CPU seconds and the largest peak, in kB, of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime, used.ru_maxrss


@pytest.fixture(autouse=True)
def _fresh():
    template._sandbox(os.getpid()).end()


@pytest.mark.parametrize("name", [*REFUSED, *WRITTEN])
def test_a_hostile_template_is_bounded(empty, name):
    source = REFUSED.get(name) or WRITTEN[name]
    (before, most), problems, text = cost(), None, ""
    with watched(empty):
        try:
            text = ChatTemplate.of(Path("x.jinja"), source, {"bos_token": "<s>"}).render(CHAT)
        except InputError as error:
            problems = error.problems
    template._sandbox(os.getpid()).end()
    seconds, kilobytes = cost()
    # A process begins with the peak of the one that has started it, and the largest peak so far may be another test's.
    inherited = max(most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert seconds - before < 4 and kilobytes <= max(inherited, 1_200_000)
    assert not any(empty.iterdir())
    if name in REFUSED:
        (problem,) = problems or [f"it wrote {text[:100]!r}"]
        assert_lines([problem])
        assert problem.startswith("x.jinja: ")
    else:
        assert problems is None and "os.py" not in text and "<class" not in text


def test_the_next_template_finds_another_process(empty):
    good, bad = (ChatTemplate.of(Path("x"), source, {}) for source in ("{{ messages[0].content }}", "{{ 'a' * messages|length * 10**11 }}"))
    slow = ChatTemplate.of(Path("x"), REFUSED["two loops"], {})
    for other in (bad, slow, bad):
        with pytest.raises(InputError):
            other.render(CHAT)
        assert good.render(CHAT) == "Hello"
    with pytest.raises(InputError, match=r"^x: the chat template cannot write these messages: it takes too long\. "):
        slow.render(CHAT)


def test_a_slow_template_does_not_take_its_time_for_each_chat():
    slow = ChatTemplate.of(Path("x"), "{% for a in range(99999) %}{% for b in range(20) %}{% endfor %}{% endfor %}x", {})
    with pytest.raises(InputError, match="it takes too long"):
        for _ in range(100):
            slow.render(CHAT)


def test_each_of_many_chats_costs_little_once_a_template_has_taken_too_long(empty):
    slow = ChatTemplate.of(Path("x"), REFUSED["two loops"], {})
    (begun, _), sandbox = cost(), template._sandbox(os.getpid())
    for _ in range(30):
        with pytest.raises(InputError, match="it takes too long"):
            slow.render(CHAT)
    sandbox.end()
    # A second for each would be thirty.
    assert cost()[0] - begun < 5
