"""YAML and JSON text, and the surprises in it."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drastate.kube.text import SIZE_MAX_BYTES, read_documents


def values_of(text):
    return [document.value for document in read_documents(text)[0]]


def problems_of(text):
    return [str(problem) for problem in read_documents(text)[1]]


def test_documents_know_their_line():
    """Documents come with the line where they start; empty ones are left out."""
    documents, problems = read_documents("# comment\n---\na: 1\n---\n---\nb: 2\n...\n")
    assert [tuple(each) for each in documents] == [(3, {"a": 1}), (6, {"b": 2})]
    assert problems == []


@pytest.mark.parametrize("text", ["", "\n", "---\n", "# only a comment\n", "---\n---\n", "null\n"])
def test_no_documents(text):
    """A text without content is no problem here."""
    assert read_documents(text) == ([], [])


BROKEN = {
    "a: {": "line 4",
    "a: 'x": "",
    'a: "x': "",
    "a: b: c": "line 3: mapping values are not allowed",
    "a: 1\nb: 2\na: 3": "line 5: key 'a' is there twice",
    "a: {x: 1, x: 1}": "line 3: key 'x' is there twice",
    "a: *nowhere": "line 3: found undefined alias",
    "a: &a [*a]": "line 3: an alias that holds itself",
    "a: !!int x": "line 3: a value that cannot be read",
    "a: !!bool x": "line 3: a value that cannot be read",
    "a: !!timestamp x": "line 3: a value that cannot be read",
    "a: !!python/name:os.system x": "line 3: could not determine a constructor",
    "a: 1\nb: \x01": "line 4: character '\\x01' is not allowed",
    "a: \ud800": "line 3: character",
    "? [a]\n: b": "line 3: found unhashable key",
    "[" * 250 + "]" * 250: "line 3: nested more than 200 levels",
    "[" * 100_000: "line 3: ",
    "- " * 100_000: "line 3: ",
    "\t- a": "",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda text: repr(text[:20]))
def test_broken_document_hides_no_other(broken):
    """The documents before and after a broken one are read, and the problem is one line."""
    text = f"first: 1\n---\n{broken}\n---\nlast: 1\n"
    documents, problems = read_documents(text)
    assert [document.value for document in documents] == [{"first": 1}, {"last": 1}]
    [problem] = problems
    assert str(problem).startswith(BROKEN[broken])
    assert "\n" not in str(problem)
    assert documents[-1].line == text.count("\n")


def test_many_broken_documents():
    """After some number of problems the rest is given up, which is a problem of its own."""
    problems = problems_of("a: {\n---\n" * 100)
    assert len(problems) == 21
    assert "not read" in problems[-1]


def test_plain_words():
    """Words mean what they mean to Kubernetes: dates and "=" are text, numbers are numbers."""
    text = "{a: 2024-13-45, b: 2024-01-01T00:00:00Z, c: =, d: 1e10, e: 12, f: yes, g: ~}\n"
    assert values_of(f"- {text}") == [
        [
            {
                "a": "2024-13-45",
                "b": "2024-01-01T00:00:00Z",
                "c": "=",
                "d": "1e10",
                "e": 12,
                "f": True,
                "g": None,
            }
        ]
    ]


def test_anchors_and_merge_keys():
    """Ordinary anchors and merge keys work, and a merged key may be set again."""
    text = "base: &base {x: 1, y: 2}\nused: *base\nmerged: {<<: *base, y: 3}\n"
    [value] = values_of(text)
    assert value["used"] == {"x": 1, "y": 2}
    assert value["merged"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("how", ["[{}]", "{{<<: [{}]}}"])
def test_alias_bombs(how):
    """Aliases that would grow a document without end are refused at once."""
    lines = ["a0: &a0 " + ("[x, x]" if how[0] == "[" else "{x: 1}")]
    for number in range(1, 40):
        inner = ", ".join([f"*a{number - 1}"] * 9)
        lines.append(f"a{number}: &a{number} " + how.format(inner))
    documents, [problem] = read_documents("\n".join(lines))
    assert documents == []
    assert "aliases make this document too large" in problem.reason


def test_text_that_is_too_large():
    """A text over the limit is not parsed at all."""
    assert "larger than 8 MiB" in problems_of("#" * (SIZE_MAX_BYTES + 1))[0]


def test_json():
    """JSON is read as such, tabs and all; duplicate keys and broken JSON have a line."""
    assert values_of('{\n\t"a": [1,\t2]\n}\n') == [{"a": [1, 2]}]
    assert problems_of('{\n"a": 1,\n"a": 2}') == ["line 3: key 'a' is there twice"]
    assert problems_of('{\n"a": 1,\n"b": [}')[0].startswith("line 3: ")
    assert problems_of('{"a": ' * 50_000 + "1" + "}" * 50_000)[0].startswith("line 1: ")
    assert values_of("{a: 1}") == [{"a": 1}]


WORDS = st.text(alphabet="aZ09 _-.:/{}[]'\"#&*!|>%@`,?=~\n\t\u00e4\U0001f600", max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(st.dictionaries(WORDS, JSON, min_size=1), max_size=3))
def test_what_is_written_is_read(values):
    """What YAML and JSON writers write comes back."""
    dumped = yaml.safe_dump_all(values, allow_unicode=True)
    assert read_documents(dumped)[1] == []
    assert values_of(dumped) == values
    if values:
        assert values_of(json.dumps(values[0])) == values[:1]


@given(st.text(max_size=60) | st.text(alphabet="ab:{}[]-'\"\n &*!|>%#,?0<=", max_size=60))
def test_any_text(text):
    """No text raises, and what is not read is told."""
    documents, problems = read_documents(text)
    for problem in problems:
        assert problem.reason
        assert problem.line is None or 1 <= problem.line <= text.count("\n") + 2
    assert all(document.value is not None for document in documents)
