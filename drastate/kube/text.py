"""YAML and JSON text into plain values, each document on its own. No I/O here.

Stricter than the YAML library where a manifest could mean two things (duplicate keys) or harm
(aliases that grow without end), and laxer where it would invent a type that JSON does not have
(dates).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import yaml

try:
    from yaml import CSafeLoader as _BaseLoader
except ImportError:  # PyYAML built without libyaml: the same result, about ten times slower
    from yaml import SafeLoader as _BaseLoader  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Longest text that is read. Kubernetes takes objects up to some 1.5 MiB; this leaves room for
#: lists.
SIZE_MAX_BYTES = 8 * 1024 * 1024

#: Deepest nesting. Kubernetes objects need some 20; the value is arbitrary, far above that and far
#: below Python's recursion limit.
_DEPTH_MAX = 200

#: By how many nodes aliases may make a document grow. Arbitrary; people who use anchors need tens.
_GROWTH_MAX = 100_000

#: How many broken documents of one text are told apart before the rest is given up.
_PROBLEMS_MAX = 20

_TAG_PREFIX = "tag:yaml.org,2002:"
_SEPARATOR = re.compile(r"^---(?=\s|$)", re.MULTILINE)

#: Control characters and halves of surrogate pairs. Source: YAML 1.1, c-printable.
_NOT_ALLOWED = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# What the YAML library raises for values like "!!int x" besides its own errors.
_VALUE_ERRORS = (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError)


class Document(NamedTuple):
    """One document of a text.

    Attributes:
        line: where it starts, from 1.
        value: mappings, lists, text, numbers, booleans and None.
    """

    line: int
    value: object


class TextProblem(NamedTuple):
    """A document that cannot be read.

    Attributes:
        line: where reading stopped, from 1; None when unknown.
        reason: one line.
    """

    line: int | None
    reason: str

    def __str__(self) -> str:
        return self.reason if self.line is None else f"line {self.line}: {self.reason}"


def read_documents(text: str) -> tuple[list[Document], list[TextProblem]]:
    """Reads all documents of a YAML or JSON text.

    Args:
        text: at most `SIZE_MAX_BYTES` long.

    Returns:
        The documents that could be read, without empty ones; and what could not. A broken document
        does not hide those before and after it.
    """
    if len(text) > SIZE_MAX_BYTES:
        return [], [TextProblem(None, f"larger than {SIZE_MAX_BYTES // 1024 // 1024} MiB")]
    if text.lstrip()[:1] == "{":
        try:
            return [Document(1, json.loads(text, object_pairs_hook=_unique))], []
        except (ValueError, RecursionError):
            pass  # perhaps YAML in braces; if it is broken JSON, the YAML reader knows the line
    return _read_yaml(text)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        message = "duplicate key"
        raise ValueError(message)
    return found


def _read_yaml(text: str) -> tuple[list[Document], list[TextProblem]]:
    documents: list[Document] = []
    problems: list[TextProblem] = []
    start = 0
    while True:
        first_line = text.count("\n", 0, start)
        stop = len(text)
        bad = _NOT_ALLOWED.search(text, start)
        if bad is None:
            problem = _read_until_problem(text[start:], first_line, documents)
        else:
            # The library stops at such a character before it gives out the documents in front of
            # it.
            stop = max(
                (each.start() for each in _SEPARATOR.finditer(text, start, bad.start())), default=0
            )
            if stop > start:
                problem = _read_until_problem(text[start:stop], first_line, documents)
            else:
                at = text.count("\n", 0, bad.start())
                problem = _problem(at, 0, f"character {bad.group()!r} is not allowed")
        if problem is None:
            if bad is None:
                break
            start = stop
            continue
        problems.append(problem)
        # Go on at the next document. The search starts behind the first character, so it moves
        # forward even when the broken document is the one that starts right here.
        here = start + 1 if problem.line is None else _offset(text, problem.line - 1)
        following = _SEPARATOR.search(text, max(here, start + 1))
        if following is None:
            break
        if len(problems) == _PROBLEMS_MAX:
            problems.append(TextProblem(None, "the documents after that were not read"))
            break
        start = following.start()
    return documents, problems


def _offset(text: str, line: int) -> int:
    """Where the line with this number, from 0, starts."""
    offset = 0
    for _ in range(line):
        end = text.find("\n", offset)
        if end < 0:
            return len(text)
        offset = end + 1
    return offset


def _read_until_problem(
    text: str, first_line: int, documents: list[Document]
) -> TextProblem | None:
    """Appends the documents of ``text``, up to the first problem, which it returns."""
    line: int | None = None
    try:
        loader = _Loader(text)
        try:
            while loader.check_node():
                node = loader.get_node()
                if node is None:
                    continue
                line = node.start_mark.line
                _check_growth(node, len(text))
                value = loader.construct_document(node)
                if value is not None:
                    documents.append(Document(first_line + line + 1, value))
                line = None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        at = line if mark is None else mark.line
        reason = " ".join(filter(None, (exc.problem, exc.context and f"({exc.context})")))
        return _problem(at, first_line, reason)
    except yaml.YAMLError as exc:
        return _problem(line, first_line, str(exc))
    except _VALUE_ERRORS as exc:
        return _problem(line, first_line, f"a value that cannot be read: {exc}")
    return None


def _problem(line: int | None, first_line: int, reason: str) -> TextProblem:
    one_line = " ".join(reason.split()) or "not YAML"
    return TextProblem(None if line is None else first_line + line + 1, one_line[:300])


class _Loader(_BaseLoader):
    """The safe loader, but plain words mean what Kubernetes takes them for, and no key is twice."""

    # Without dates and without "=": both are text in the YAML that the API server and its tools
    # read.
    yaml_implicit_resolvers = {  # noqa: RUF012 (the library's own way to set it)
        first: [
            (tag, pattern)
            for tag, pattern in rules
            if tag not in (_TAG_PREFIX + "timestamp", _TAG_PREFIX + "value")
        ]
        for first, rules in _BaseLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 (the library's signature)
    ) -> dict[object, object]:
        if isinstance(node, yaml.MappingNode):
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if (key.tag, key.value) in seen:
                    problem = f"key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


def _check_growth(root: yaml.Node, characters: int) -> None:
    """Refuses a document that is nested too deep, holds itself, or grows too large through aliases.

    Aliases share one node, so the document itself is small; what grows is the work of whoever walks
    it.
    """
    sizes: dict[int, int] = {}
    ancestors: set[int] = set()
    stack: list[tuple[yaml.Node, bool]] = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            ancestors.discard(id(node))
            size = 1 + sum(sizes[id(child)] for child in _children(node))
            if size > characters + _GROWTH_MAX:
                _refuse(node, "aliases make this document too large")
            sizes[id(node)] = size
        elif id(node) in ancestors:
            _refuse(node, "an alias that holds itself")
        elif id(node) not in sizes:
            ancestors.add(id(node))
            if len(ancestors) > _DEPTH_MAX:
                _refuse(node, f"nested more than {_DEPTH_MAX} levels deep")
            stack.append((node, True))
            stack.extend((child, False) for child in _children(node))


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair


def _refuse(node: yaml.Node, problem: str) -> None:
    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
