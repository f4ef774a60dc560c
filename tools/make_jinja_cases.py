#!/usr/bin/env python3
"""Writes tests/data/jinja/cases.json: small templates and what jinja2, set up as transformers sets it up, makes of them.

Run with a Python that has transformers and jinja2 3.1:  python tools/make_jinja_cases.py
A case is {"template", "context", "expected"} or {"template", "context", "error"} where error is the exception's type and
message; "syntax" marks templates that do not even parse.
"""

import datetime
import json
import pathlib

import jinja2
from transformers.utils import chat_template_utils

NOW = datetime.datetime(2025, 3, 5, 14, 7, 9)


class FixedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = FixedClock

CONTEXT = {
    "name": "Ada",
    "n": 7,
    "x": 2.5,
    "big": 9007199254740993,
    "huge": 18446744073709551615,
    "yes": True,
    "no": False,
    "nil": None,
    "empty": "",
    "words": "  the quick  brown\tfox\n",
    "uni": "naïve café — 日本語 😀",
    "xs": [3, 1, 2],
    "letters": ["b", "A", "c", "a"],
    "nested": [[1, 2], [3], []],
    "d": {"b": 1, "a": {"deep": [1, 2.0, None, True]}, "items": "shadowed"},
    "users": [
        {"name": "Bob", "age": 30, "city": "Paris", "admin": True},
        {"name": "alice", "age": 25, "city": "Rome", "admin": False},
        {"name": "Carl", "age": 30, "city": "paris", "tags": ["x", "y"]},
    ],
    "tree": [{"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3, "kids": [{"v": 4, "kids": []}]}]}, {"v": 5, "kids": []}],
    "floats": [1.0, -2.5e-07, 1e22, 1e16, 123456789.125, 0.0001, 0.00001, -0.0],
    "quoted": "it's \"so\"\n\\ \x07 \x7f </b> é",
    "numbers": ["12", " -7 ", "0x1F", "3.9", "abc", ""],
}

WHITESPACE = r"""
a{% if yes %} b {% endif %}c
a {%- if yes -%} b {%- endif -%} c
{{ name }} {{- name }} {{ name -}} {{ name }}
""" .strip().split("\n")

LATER = [
    # `else` of a loop none of whose rounds reached its end.
    "{% for x in xs %}{% break %}{% else %}E{% endfor %}",
    "{% for x in xs %}{% continue %}{% else %}E{% endfor %}",
    "{% for x in xs %}{% if loop.last %}{% break %}{% endif %}a{% else %}E{% endfor %}",
    "{% for x in xs %}{% if loop.first %}{% continue %}{% endif %}a{% else %}E{% endfor %}",
    "{% for x in xs %}{{ loop.previtem is defined }} {{ loop.previtem }},{% endfor %}",
    # Case mappings that are not one to one, and the final sigma.
    "{{ 'ΑΣ'|lower }} {{ 'ΑΣ Σ Σα Α.Σ ΑΣ. ΑΣ\u0301'|lower }} {{ 'İ'|lower }} {{ 'ªΣ ΣΣ ͅΣ'|lower }}",
    "{{ 'ﬁn ß ŉ ǰ ᾳ ΰ ﬃ և'|upper }} {{ 'ﬁn'|title }} {{ 'ﬁN'|capitalize }} {{ 'ﬁN ǆ ᾳ ßa ⅰa ªa'.title() }}",
    "{{ 'ΑΣ'.swapcase() }} {{ 'aB ǅ ⅰ Ⓐ ß İ'.swapcase() }} {{ 'ΌΣ'.capitalize() }} {{ 'ΑΣ ΒΣ'.title() }}",
    "{{ 'ﬁ ß ς İ ǅ'.casefold() }} {{ ''|upper }} {{ ['ß', 'SS', 'ΑΣ', 'ας']|unique|list }}",
    # Digits of other scripts.
    "{{ '٣٤'|int }} {{ '٣.٥'|float }} {{ '-٣'|int }} {{ '１２'|int }} {{ '²'|int(9) }} {{ '𝟙𝟚'|int }} {{ 'a١'|int(5, 16) }}",
    "{{ '１_２'|int }} {{ '１e２'|float }} {{ '\u3000７ '|int }}",
    # Integers that a float does not hold, divided; and the sign of nothing.
    "{{ big/1 }} {{ huge/3 }} {{ big/9007199254740992 }} {{ (2**100+1)/(2**53+1) }} {{ -big/2 }} {{ 0/big }} {{ 1/huge }}",
    "{{ (2**120+1)/(2**120-1) }} {{ (2**53+1)/(2**54) }} {{ 7/-2 }} {{ (2**126)/3 }} {{ 3/(2**126) }} {{ big/-big }}",
    "{{ 6.0 % -3.0 }} {{ -6.0 % 3.0 }} {{ -0.0 % 5 }} {{ 5.5 % -2 }}",
    # groupby by name, keys that no item has, nothing at all.
    "{% for g in users|groupby('age') %}{{ g.grouper }}: {{ g.list|length }} {{ g['grouper'] }} {{ g[0] }};{% endfor %}",
    "{{ users|groupby('age')|map(attribute='grouper')|list }} {{ (users|groupby('age'))[0].nope }}",
    "{{ users|sort(attribute='nope')|map(attribute='name')|join(',') }} {{ users|sort(attribute='nope,name')|map(attribute='name')|join(',') }}",
    "{{ users|sort(attribute='tags') }}",
    "{{ [nope, nope]|sort|length }}",
    "{{ [1, nope]|sort }}",
    "{{ nope|last }}{{ nope|last is undefined }}{{ nope|first is undefined }}",
    "{{ 5|last }}",
    # Syntax that a chat template cannot have, where it is never reached and where it is.
    "{% if no %}{% import 'x' as y %}{% from 'x' import a, b as c with context %}{% include 'x' ignore missing %}{% endif %}A",
    "{% import 'x' as y %}",
    "{% include 'x' %}",
    "{% if no %}{% extends 'x' %}{% endif %}B",
    "{% if no %}{% autoescape true %}{{ '<' }}{% endautoescape %}{% endif %}{% autoescape no %}{{ '<' }}{% endautoescape %}",
    "{% if no %}{{ '\\N{BULLET}' ~ 'x' 'y\\N{BULLET}' }}{% endif %}C",
    "{{ '\\N' }}",
    "{{ '\\N{}' }}",
]

TEMPLATES = WHITESPACE + [
    # White space, comments, raw text.
    "{% if yes %}\nline\n{% endif %}\nend",
    "  {% if yes %}\n  line\n  {% endif %}\nend\n",
    "  {%+ if yes %}\n  line\n  {%+ endif %}\nend\n\n",
    "x  {% if yes %}\n  line{% endif +%}\nend",
    "{# a comment #}\nafter\n  {# indented #}\n  {#- cut -#}  \n tail {#+ kept +#}\nend",
    "{{ name }}\n{{ name }}\n",
    "{% raw %}{{ not }} {% this %}{% endraw %}\nend",
    "a {%- raw -%}  {{ x }}  {%- endraw -%}  b",
    "  {% raw %}\n  text\n  {% endraw %}\nend",
    "a\r\nb\rc{% if yes %}\r\nd{% endif %}",
    "{{ '{{ }}' }} {{ \"%}\" }} { { %} }} #}",
    "{{ {'a': {'b': 1}}['a'] }}",
    "{{- '\\n' -}}\n\n x",
    "    {{ name }}\n",
    "\u3000{%- if yes %} wide{% endif %}",
    "{% for x in xs %}\n{{ x }}\n{% endfor %}\n",
    "{% if no %}{% endif %}",
    "",
    "\n",
    "\n\n",
    "only text {",
    # Literals, escapes, printing.
    r"{{ 'a\tb\n\x41\u00e9\U0001F600\101\q\'' }}|{{ 'it' 's' }}|{{ 'line\
next' }}",
    "{{ 1_000 }} {{ 0x1F }} {{ 0b101 }} {{ 0o17 }} {{ 1.5e3 }} {{ 1e-7 }} {{ 1_0.5 }} {{ 00 }}",
    "{{ true }} {{ False }} {{ none }} {{ None }} {{ [] }} {{ {} }} {{ () }} {{ (1,) }} {{ (1, 2) }} {{ [1, 'a', 2.0, none] }}",
    "{{ d }} {{ quoted }} {{ [quoted] }} {{ ['it\\'s'] }} {{ ['\"'] }} {{ ['é日\u200b'] }}",
    "{{ floats }} {{ 1e400 }} {{ -1e400 }} {{ 5e-324 }} {{ 1.7976931348623157e308 }}",
    "{{ big }} {{ huge }} {{ big + 1 }} {{ big * 3 }} {{ huge + 1 }}",
    "{{ 1, 2 }} {{ missing }} {{ [missing] }}",
    # Arithmetic.
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }}",
    "{{ 7 / 2 }} {{ 6 / 2 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ +n }} {{ -x }} {{ - n }}",
    "{{ true + 1 }} {{ 'ab' * 3 }} {{ 2 * [1] }} {{ [1] + [2] }} {{ (1,) + (2,) }} {{ 'a' + 'b' }} {{ 'x' * -1 }}",
    "{{ 1 ~ 'a' ~ none ~ 2.0 ~ [1] ~ missing }}",
    "{{ 1 ~ 2 + 3 }}",
    "{{ 5 is odd if yes else 0 }}",
    "{{ 0.1 + 0.2 }} {{ 1e16 + 1.0 }} {{ 10 / 3 }} {{ 3 * 1.0 }} {{ 2 ** 0.5 }} {{ 1 - 1.0 }}",
    # Comparison and logic.
    "{{ 1 == 1.0 }} {{ 1 == true }} {{ '1' == 1 }} {{ none == none }} {{ missing == missing }} {{ missing == none }} {{ [1] == (1,) }}",
    "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 2 >= 2 }} {{ 1 != 2 }} {{ 'é' > 'z' }}",
    "{{ big == 9007199254740992.0 }} {{ big > 9007199254740992.0 }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1.0} }}",
    "{{ 0 or 'x' }} {{ '' and 'y' }} {{ not 0 }} {{ not [] and 1 }} {{ 1 and 2 or 3 }} {{ none or missing or 'z' }} {{ not not 3 }}",
    "{{ 1 in xs }} {{ 9 not in xs }} {{ 'an' in 'banana' }} {{ 'b' in d }} {{ 'z' in d }} {{ 1 in missing }} {{ '' in '' }} {{ true in xs }}",
    "{{ 'a' if yes else 'b' }} {{ 'a' if no }} {{ 'a' if no else 'b' if no else 'c' }} {{ ('x' if yes) ~ 'y' }}",
    "{{ yes is true and n is number or 1 }} {{ not n is string }} {{ 1 == 1 == 1 }}",
    # Access, slices.
    "{{ d.b }} {{ d['b'] }} {{ d.a.deep[1] }} {{ d.a['deep'][-1] }} {{ d.zzz }} {{ xs[0] }} {{ xs.1 }} {{ xs[9] }} {{ xs[-3] }} {{ xs['q'] }}",
    "{{ d['items'] }} {{ d.items is callable }} {{ d.items() | list | length }} {{ d.get('b') }} {{ d.get('q', 5) }} {{ d.get('q') }}",
    "{{ d.keys() }} {{ d.values() | list }} {{ d.items() | first }} {{ users[0].items() }}",
    "{{ xs[1:] }} {{ xs[:-1] }} {{ xs[::-1] }} {{ xs[5:] }} {{ xs[0:3:2] }} {{ xs[-2:] }} {{ (1,2,3)[1:] }} {{ xs[:] }} {{ xs[none:2] }}",
    "{{ uni[0] }} {{ uni[-1] }} {{ uni[2] }} {{ uni[6:11] }} {{ uni[::-1] }} {{ uni[-3:] }} {{ uni[::4] }} {{ uni | length }}",
    "{{ 'abc'[5:] }}|{{ 'abc'[-9:2] }}|{{ 'abc'[10] }}|{{ 'abc'[2:0:-1] }}|{{ ''[:1] }}",
    "{{ {1: 'int', 'k': 'str', none: 'null', (1, 2): 't'}[true] }} {{ {'a': 1, 'a': 2} }} {{ {1: 'a', 1.0: 'b', true: 'c'} }}",
    "{{ nil[0] }}|{{ n.foo }}|{{ n['foo'] }}|{{ 'abc'['upper']() }}|{{ 'abc'.nope is defined }}",
    "{{ d.pop is defined }} {{ xs.append is defined }} {{ xs.index(1) }} {{ xs.count(2) }} {{ (1, 1).count(1) }}",
    # if, for.
    "{% if n > 5 %}big{% elif n > 3 %}mid{% else %}small{% endif %} {% if missing %}a{% elif nil %}b{% else %}c{% endif %}",
    "{% for x in xs %}{{ loop.index }}/{{ loop.length }}:{{ x }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{% for x in xs %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }} {% endfor %}",
    "{% for x in xs %}[{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}]{% if loop.previtem is defined %}p{% endif %}{% endfor %}",
    "{% for x in [] %}a{% else %}none{% endfor %} {% for x in xs if x > 5 %}a{% else %}filtered{% endfor %}",
    "{% for x in range(10) if x is odd %}{{ loop.index }}:{{ x }}:{{ loop.last }}:{{ loop.length }} {% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {% for k in d %}{{ k }},{% endfor %} {% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for c in 'aé😀' %}<{{ c }}>{% endfor %} {% for x in missing %}a{% else %}undefined{% endfor %} {% for x in (1, 2) %}{{ x }}{% endfor %}",
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in xs %}{% for y in xs %}{% if y == 2 %}{% break %}{% endif %}{{ x }}{{ y }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% for x in xs %}{{ loop.cycle('odd', 'even') }} {{ loop.changed(x > 1) }} {% endfor %}",
    "{% for node in tree recursive %}<{{ node.v }} {{ loop.depth }}{{ loop.depth0 }}{{ loop(node.kids) }}>{% endfor %}",
    "{% set ns = namespace(stop=false) %}{% for x in xs if not ns.stop %}{{ x }}{% if x == 1 %}{% set ns.stop = true %}{% endif %}{% endfor %}",
    "{% for x in xs: %}{{ x }}{% endfor %} {% if yes: %}colon{% endif %}",
    "{% for x in 1, 2 %}{{ x }}{% endfor %} {% for x in xs if x != 1 if yes %}{{ x }}{% endfor %}",
    "{% for i in range(5) %}{{ i }}{% endfor %} {% for i in range(5, 0, -2) %}{{ i }}{% endfor %} {{ range(3) | list }} {{ range(2, 4)[1] }} {{ range(4) }}",
    # set and scopes.
    "{% set a = 1 %}{{ a }}{% set a, b = 2, 3 %}{{ a }}{{ b }}{% set (c, d2) = [4, 5] %}{{ c }}{{ d2 }}{% set t = 1, 2 %}{{ t }}",
    "{% set a = 1 %}{% for x in xs %}{% set a = a + 1 %}{{ a }}{% endfor %}{{ a }}",
    "{% set a = 1 %}{% if yes %}{% set a = 2 %}{% endif %}{{ a }} {% for x in xs %}{{ q is defined }}{% set q = x %}{{ q }} {% endfor %}{{ q is defined }}",
    "{% for x in xs %}{% if loop.first %}{% set name = 'inner' %}{% endif %}{{ name }} {% endfor %}{{ name }}",
    "{% set ns = namespace(a=1, b='x') %}{% for x in xs %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }} {{ ns.b }} {{ ns.c is defined }} {{ ns['a'] }}",
    "{% set ns = namespace({'k': 1}, j=2) %}{{ ns.k }}{{ ns.j }}{% set ns.new = [] %}{{ ns.new }}{% set ns.new = ns.new + [1] %}{{ ns.new }}",
    "{% set block %}  text {{ n }}\n{% endset %}[{{ block }}] {% set up | upper | trim %} abc {{ name }} {% endset %}[{{ up }}]",
    "{% set block %}{% set inner = 1 %}{% endset %}{{ inner is defined }} {% with a = 1, b = n %}{{ a }}{{ b }}{% set c = 2 %}{% endwith %}{{ a is defined }}{{ c is defined }}",
    "{% with %}{% set z = 1 %}{{ z }}{% endwith %}{{ z }} {% set x = 5 %}{% with x = 1, y = x %}{{ x }}{{ y }}{% endwith %}",
    "{% for x in xs %}{% endfor %}{{ x }} {% set loop_x = 0 %}{% for loop_x in xs %}{% endfor %}{{ loop_x }}",
    "{% generation %}gen {{ name }}{% set g = 1 %}{% endgeneration %}{{ g is defined }}",
    "{% block body %}in block {{ name }}{% endblock %} {% print name, n %}",
    "{% filter upper %}abc {{ name }}{% endfilter %} {% filter replace('a', 'o') | title %}banana bar{% endfilter %}",
    # Macros.
    "{% macro m(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(1, c=5) }} {{ m(b=1, a=2) }} {{ m() }}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }} {% macro v() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ v(1, 2, k=3) }}",
    "{% macro f(k) %}{{ k }}{% if k > 0 %}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(3) }} {{ f.name }}",
    "{% macro dialog(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call dialog('b') %}body {{ name }}{% endcall %}",
    "{% macro each(items) %}{% for i in items %}{{ caller(i, loop.index) }}{% endfor %}{% endmacro %}{% call(x, i) each(xs) %}({{ i }}:{{ x }}){% endcall %}",
    "{% macro m() %}{{ name }}{{ later }}{% endmacro %}{% set later = 'L' %}{{ m() }} {% set r = m() %}{{ r | length }}",
    "{% macro m(name) %}{{ name is defined }}{{ name }}{% endmacro %}{{ m() }} {{ m(none) }} {{ m(*[4]) }} {{ m(**{'name': 5}) }}",
    "{% macro m() %}{% if who is not defined %}{% set who = 'default' %}{% endif %}{{ who }}{% endmacro %}{{ m() }}{{ who is defined }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }} {% set j = joiner('|') %}{{ j() }}x{{ j() }}y{{ j() }}",
    # String methods.
    "[{{ words.strip() }}] [{{ words.lstrip() }}] [{{ words.rstrip() }}] {{ 'xxabcxx'.strip('x') }} {{ 'abcab'.rstrip('ab') }} {{ 'éaé'.lstrip('é') }}",
    "{{ words.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a b c'.split(none, 1) }} {{ ' a  b '.split(' ') }} {{ ''.split() }} {{ ''.split(',') }}",
    "{{ 'a,b,c'.rsplit(',', 1) }} {{ ' a b  c '.rsplit(none, 1) }} {{ ' a b  c '.rsplit() }} {{ 'a</think>b</think>c'.split('</think>')[-1] }} {{ 'abc'.split('') if no }}",
    "{{ 'abc'.startswith('a') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.startswith('b', 1) }} {{ 'abc'.endswith('b', 0, 2) }} {{ ''.startswith('') }}",
    "{{ 'Hello World'.upper() }} {{ 'ÀÉß'.lower() }} {{ 'straße é'.upper() }} {{ \"they're bill's\".title() }} {{ 'hELLO wORLD'.capitalize() }} {{ 'aBc'.swapcase() }}",
    "{{ 'banana'.replace('an', 'AN') }} {{ 'banana'.replace('a', '', 2) }} {{ 'abc'.replace('', '-') }} {{ 'aaa'.replace('a', 'b', 0) }}",
    "{{ 'banana'.find('an') }} {{ 'banana'.rfind('an') }} {{ 'banana'.find('x') }} {{ 'é日本'.find('本') }} {{ 'banana'.find('an', 2) }} {{ 'banana'.index('n') }} {{ 'banana'.count('an') }} {{ 'aé'.count('') }}",
    "{{ ', '.join(['a', 'b']) }} {{ ''.join('abc') }} {{ '-'.join({'x': 1, 'y': 2}) }} {{ 'a\\nb\\r\\nc\\n'.splitlines() }} {{ 'a\\nb'.splitlines(true) }}",
    "{{ 'prefix-body'.removeprefix('prefix-') }} {{ 'body.txt'.removesuffix('.txt') }} {{ 'a=b=c'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ 'abc'.partition('=') }}",
    "{{ 'abc'.isalpha() }} {{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }} {{ 'ABC'.isupper() }} {{ 'abc1'.islower() }} {{ ''.isalpha() }} {{ 'é'.isalpha() }} {{ 'é'.isascii() }}",
    "[{{ 'ab'.center(7, '*') }}] [{{ 'abc'.center(6, '*') }}] [{{ 'ab'.ljust(5) }}] [{{ 'ab'.rjust(5, '0') }}] [{{ '-7'.zfill(5) }}] [{{ 'a\\tb'.expandtabs(4) }}]",
    "{{ '{} {}'.format(1, 'b') }} {{ '{1}{0}{1}'.format('a', 'b') }} {{ '{x:>5}|{x:<5}|{x:^5}'.format(x='ab') }} {{ '{:.2f} {:05d} {:,} {:x}'.format(3.14159, 42, 1234567, 255) }} {{ '{0[a]} {1.b}'.format({'a': 1}, {'b': 2}) if no }} {{ '{{}}'.format() }} {{ '{!r}'.format('a') }}",
    "{{ '%s-%d-%5.2f-%r-%%-%05d-%x' % ('a', 3, 2.5, 'q', 42, 255) }} {{ '%s' % 'one' }} {{ '%(k)s' % {'k': 1} }} {{ '%-5s|%5s|' % ('a', 'b') }} {{ '%+d %e %g' % (5, 12345.678, 0.0001) }}",
    # Filters.
    "{{ d | tojson }} {{ quoted | tojson }} {{ floats | tojson }} {{ big | tojson }} {{ huge | tojson }} {{ (1, 2) | tojson }} {{ none | tojson }} {{ uni | tojson }} {{ [] | tojson }} {{ {} | tojson }}",
    "{{ d | tojson(indent=2) }}\n{{ [[], {}, [1]] | tojson(indent=4) }}\n{{ [1] | tojson(indent='\t') }}\n{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=true) }} {{ uni | tojson(ensure_ascii=true) }}",
    "{{ {1: 1, 2.5: 2, none: 3, true: 4} | tojson }} {{ {'a': {'b': [1, {'c': 2}]}} | tojson(indent=0) }}",
    "[{{ words | trim }}] {{ 'xxaxx' | trim('x') }} {{ n | trim }} {{ nil | trim }} {{ missing | trim }}",
    "{{ xs | join(', ') }} {{ users | join(', ', attribute='name') }} {{ xs | join }} {{ 'abc' | join('-') }} {{ missing | join('-') }} {{ [none, true, 1.0] | join('/') }}",
    "{{ xs | length }} {{ d | count }} {{ uni | length }} {{ missing | length }} {{ () | length }} {{ d.keys() | length }}",
    "{{ xs | first }} {{ xs | last }} {{ [] | first is defined }} {{ 'abc' | last }} {{ uni | first }} {{ d | first }} {{ d | last }}",
    "{{ 'aBC dE' | upper }} {{ 'ABC' | lower }} {{ 'hello WORLD' | capitalize }} {{ \"hello wORLD foo-bar (baz) it's\" | title }} {{ n | upper }} {{ nil | lower }}",
    "{{ 'banana' | replace('a', 'o') }} {{ 'banana' | replace('a', 'o', 1) }} {{ n | replace(7, 'seven') }} {{ 'abc' | replace('', '.') }}",
    "{{ missing | default('def') }} {{ '' | default('def') }} {{ '' | default('def', true) }} {{ nil | d('x') }} {{ no | default('f', boolean=true) }} {{ missing | default }}",
    "{{ users | map(attribute='name') | list }} {{ users | map(attribute='tags', default='-') | list }} {{ letters | map('upper') | join }} {{ users | map(attribute='tags.0', default='?') | join(',') }} {{ nested | map('length') | list }} {{ words.split() | map('replace', 'o', '0') | list }}",
    "{{ xs | select('odd') | list }} {{ xs | reject('gt', 1) | list }} {{ xs | select('in', [1, 2]) | list }} {{ [0, 1, '', none] | select | list }} {{ [0, 1, ''] | reject | list }} {{ letters | select('equalto', 'a') | list }}",
    "{{ users | selectattr('admin') | map(attribute='name') | list }} {{ users | rejectattr('admin') | map(attribute='name') | list }} {{ users | selectattr('age', 'equalto', 30) | list | length }} {{ users | selectattr('tags', 'defined') | map(attribute='name') | join }} {{ users | selectattr('city', 'in', ['Rome']) | list | length }}",
    "{% if [] | select | list %}a{% else %}b{% endif %} {% if [] | map('upper') %}generators are true{% endif %} {% set g = xs | map('string') %}{{ g | list }}{{ g | list }} {{ xs | select('odd') | first }}",
    "{{ 'abc' | list }} {{ d | list }} {{ (1, 2) | list }} {{ d | items | list }} {{ missing | items | list }}",
    "{% for k, v in {'b': 2, 'A': 1, 'c': 0} | dictsort %}{{ k }}{{ v }} {% endfor %}{{ {'b': 2, 'A': 1} | dictsort(true) }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }} {{ {'b': 1, 'a': 2} | dictsort(reverse=true) }}",
    "{{ xs | sort }} {{ xs | sort(reverse=true) }} {{ letters | sort }} {{ letters | sort(case_sensitive=true) }} {{ users | sort(attribute='age') | map(attribute='name') | list }} {{ users | sort(attribute='age,name') | map(attribute='name') | list }} {{ users | sort(true, attribute='age') | map(attribute='name') | list }}",
    "{{ ['a', 'B', 'A', 'b', 'c'] | unique | list }} {{ ['a', 'A'] | unique(true) | list }} {{ [1, 1.0, true, 2] | unique | list }} {{ users | unique(attribute='city') | map(attribute='name') | list }}",
    "{{ xs | reverse | list }} {{ uni | reverse }} {{ xs | sum }} {{ users | sum(attribute='age') }} {{ xs | sum(start=10) }} {{ [0.1] * 3 | sum if no }} {{ [] | sum }} {{ [0.5, 1] | sum }}",
    "{{ xs | min }} {{ xs | max }} {{ letters | min }} {{ letters | max }} {{ [] | min is defined }} {{ users | max(attribute='age') | attr('x') is defined }} {{ (users | min(attribute='age')).name }}",
    "{{ -5 | abs }} {{ (-5) | abs }} {{ (-2.5) | abs }} {{ true | abs }}",
    "{% for s in numbers %}{{ s | int }},{{ s | int(-1) }},{{ s | float }};{% endfor %} {{ '1F' | int(base=16) }} {{ '0x1F' | int(0, 16) }} {{ 3.99 | int }} {{ -3.99 | int }} {{ nil | int }} {{ true | int }} {{ '1e3' | float }} {{ 'nan' | float }} {{ 'x' | float(1.5) }} {{ xs | int(9) }}",
    "{{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 42.55 | round(1, 'floor') }} {{ 42.51 | round(1, 'ceil') }} {{ 7 | round }} {{ 1234 | round(-2) }} {{ 2.5 | round | int }} {{ -0.4 | round }} {{ 1250.0 | round(-2) }}",
    "{{ n | string ~ 'x' }} {{ nil | string }} {{ [1] | string | length }} {{ '<b>' | escape }} {{ '<b>' | e | e }} {{ '<a>' | safe }} {{ '<a>' | safe + '<b>' }} {{ '<x>' + ('<y>' | e) }} {{ '<a>&' | forceescape }} {{ ('<a>' | safe).upper() + '&' }}",
    "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb' | indent(2, blank=true) }}|{{ 'a\\nb' | indent('> ') }}|{{ '' | indent }}|{{ 'a\\n' | indent }}",
    "{{ [1, 2, 3, 4, 5] | batch(2) | list }} {{ [1, 2, 3] | batch(2, 0) | list }} {{ range(7) | slice(3) | list }} {{ range(7) | slice(3, 'x') | list }}",
    "{% for g in users | groupby('city') %}{{ g.grouper if no }}{{ g[0] }}:{{ g[1] | map(attribute='name') | join(',') }};{% endfor %} {% for age, people in users | groupby('age') %}{{ age }}={{ people | length }} {% endfor %}{{ users | groupby('tags', default='none') | length if no }}",
    "{{ 'the quick, brown fox' | wordcount }} {{ 'foo bar baz qux' | truncate(9) }} {{ 'foo bar baz qux' | truncate(9, true) }} {{ 'foo bar baz qux' | truncate(11) }} {{ 'foo bar baz qux' | truncate(11, false, '...', 0) }} {{ 'ab' | center(6) }}|",
    "{{ '%s is %d' | format('x', 3) }} {{ '%(a)s' | format(a=1) }} {{ 'a b/é&' | urlencode }} {{ 1000000 | filesizeformat }} {{ 1 | filesizeformat }} {{ 2048 | filesizeformat(true) }} {{ 999 | filesizeformat }}",
    "{{ xs | map('string') | map('upper') | join(' ') | trim | upper }} {{ (xs | first) + 1 }} {{ xs | length > 2 }} {{ not xs | length }} {{ -1 | abs }} {{ 'a' ~ 'b' | upper }}",
    # Tests.
    "{{ missing is defined }} {{ n is defined }} {{ missing is undefined }} {{ nil is none }} {{ n is not none }} {{ missing is none }} {{ d.q is defined }} {{ d.q is undefined }}",
    "{{ n is number }} {{ x is number }} {{ yes is number }} {{ n is integer }} {{ yes is integer }} {{ x is integer }} {{ x is float }} {{ n is float }} {{ yes is boolean }} {{ n is boolean }} {{ name is string }} {{ n is string }}",
    "{{ d is mapping }} {{ xs is mapping }} {{ xs is sequence }} {{ d is sequence }} {{ name is sequence }} {{ n is sequence }} {{ xs is iterable }} {{ name is iterable }} {{ n is iterable }} {{ missing is iterable }} {{ missing is sequence }} {{ (xs | map('string')) is sequence }} {{ d.items() is sequence }} {{ d.items() is iterable }}",
    "{{ yes is true }} {{ 1 is true }} {{ no is false }} {{ 0 is false }} {{ range is callable }} {{ name is callable }} {{ name.upper is callable }} {{ missing is callable }}",
    "{{ 3 is odd }} {{ 4 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 1 is eq 1 }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 2 is ge 2 }} {{ 3 is greaterthan 2 }} {{ 1 is sameas 1 }} {{ yes is sameas true }} {{ 1 is in [1] }} {{ 1 is not in [1] }}",
    "{{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 'Abc' is lower }} {{ '1' is upper }} {{ 'upper' is filter }} {{ 'nope' is filter }} {{ 'odd' is test }} {{ '<' | e is escaped }} {{ n is eq(7) and n is not odd }}",
    # Globals.
    "{{ dict(a=1, b=2) }} {{ dict([('x', 1)]) }} {{ dict({'p': 1}, q=2) }} {{ strftime_now('%d %b %Y %H:%M:%S %A %B %j %y %-d %e %p %I %%') }} [{{ strftime_now('') }}]",
    "{{ raise_exception('custom message: ' ~ n) }}",
    "{% if no %}{{ raise_exception('not reached') }}{% endif %}fine",
    # Cases that must fail.
    "{{ missing.attr }}",
    "{{ missing + 1 }}",
    "{{ missing() }}",
    "{{ d.q.r }}",
    "{{ nil.foo.bar }}",
    "{{ 'a' + 1 }}",
    "{{ 1 + 'a' }}",
    "{{ 'a' + none }}",
    "{{ [1] + (2,) }}",
    "{{ 1 < 'a' }}",
    "{{ nil < 1 }}",
    "{{ 1 in 5 }}",
    "{{ 1 in 'abc' }}",
    "{{ 1 / 0 }}",
    "{{ 1 % 0 }}",
    "{{ 5() }}",
    "{{ nil | length }}",
    "{{ 5 | length }}",
    "{{ (xs | map('string')) | length }}",
    "{{ (xs | map('string')) | tojson }}",
    "{{ missing | tojson }}",
    "{{ range | tojson }}",
    "{% for x in 5 %}{% endfor %}",
    "{% for x in nil %}{% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{% endfor %}",
    "{% set xs.a = 1 %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ xs.append(4) }}",
    "{{ d.update({'x': 1}) }}",
    "{{ {[1]: 2} }}",
    "{{ ['a', 1] | sort }}",
    "{{ 'abc'.index('z') }}",
    "{{ 'abc'.split('') }}",
    "{{ 'abc'.nope() }}",
    "{{ 'a'.join([1]) }}",
    "{{ '%d' % 'a' }}",
    "{{ '%s %s' % 'a' }}",
    "{{ '{} {}'.format(1) }}",
    "{{ nil[1:] }}",
    "{{ missing[1:] }}",
    "{{ nil | items }}{% for k, v in nil | items %}{% endfor %}",
    "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{% endmacro %}{{ m(b=1) }}",
    "{{ range(1000000) }}",
    "{{ range(1, 5, 0) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ name | nosuchfilter }}",
    "{{ name is nosuchtest }}",
    # Cases that do not parse.
    "{{ name",
    "{% if yes %}",
    "{% endif %}",
    "{% nosuchtag %}",
    "{{ 1 + }}",
    "{{ (1 }}",
    "{{ 'abc }}",
    "{{ a b }}",
    "{% set true = 1 %}",
    "{% for in xs %}{% endfor %}",
    "{# never closed",
    "{% raw %} never closed",
    "{{ [1, 2 }}",
    "{{ $ }}",
    "{{ }}",
    "{% macro m(a=1, b) %}{% endmacro %}",
    "{{ f(a=1, 2) }}",
    "{% if yes %}{% endfor %}",
    "{% include 'other' %}",
]


def run(template):
    case = {"template": template}
    try:
        compiled = chat_template_utils._compile_jinja_template(template)
    except jinja2.TemplateSyntaxError as error:
        case |= {"syntax": True, "error": {"type": type(error).__name__, "message": str(error)}}
        return case
    try:
        case["expected"] = compiled.render(**json.loads(json.dumps(CONTEXT)))
    except Exception as error:  # whatever Python raises is what we record
        case["error"] = {"type": type(error).__name__, "message": str(error).split("\n")[0]}
    return case


def main():
    cases = [run(template) for template in TEMPLATES + LATER]
    path = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "jinja" / "cases.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    path.write_text('{"context": %s,\n"cases": [\n%s\n]}\n' % (json.dumps(CONTEXT, ensure_ascii=False), lines))
    failed = sum("error" in case for case in cases)
    print(f"{len(cases)} cases, {failed} of them errors, to {path.name}")


if __name__ == "__main__":
    main()
