"""Options of a task: `lr=0.1` on a command line becomes an argument of the task's function, by its annotation."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from evenstep.errors import MAX_CHARACTERS, TaskError, shorten
from evenstep.typed_values import read_value


def options_of(source: object) -> list[inspect.Parameter]:
    """The parameters that a command may set, each with its type: annotated, or that of its default."""
    if not callable(source):
        return []
    try:
        hints = get_type_hints(source)
    except Exception:  # names that only type checkers import; a partial or a callable object has no hints
        hints = {}
    return [
        one.replace(annotation=hints.get(one.name, str if one.default is one.empty else type(one.default)))
        for one in inspect.signature(source).parameters.values()
        if one.name != "data" and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]


def read_options(source: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for a task's function, from text (`lr=0.1` on a command line) or from the JSON of a plan."""
    known = {one.name: one for one in options_of(source)}
    arguments = {}
    for name, value in given.items():
        if name not in known:
            what = f"{getattr(source, '__name__', 'the task')}() has no option {shorten(name)}"
            if name == "data":
                raise TaskError("the data folder is given as --data")
            if not known:
                raise TaskError(f"{what}: it takes none; add a parameter: def task({shorten(name)}: float = ...)")
            close = difflib.get_close_matches(name[:MAX_CHARACTERS], known, n=1)
            raise TaskError(f"{what}; {f'did you mean {close[0]}? ' if close else ''}It has {', '.join(known)}")
        kind = known[name].annotation
        is_list = isinstance(value, str) and any(get_origin(one) in (list, tuple) for one in (kind, *get_args(kind)))
        try:
            arguments[name] = read_value(name, value.split(",") if is_list else value, kind, TaskError)
        except (TypeError, NameError, NotImplementedError) as error:
            raise TaskError(f"{name} cannot be given on a command line: {error}") from error
    return arguments


def value_in_words(value: Any) -> str:
    """As it is written on a command line.

    >>> value_in_words(False), value_in_words([1, 2]), value_in_words("relu")
    ('false', '1,2', 'relu')
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(value_in_words, value)) if isinstance(value, list | tuple) else str(value)


def parse_options(words: Iterable[str]) -> dict[str, str]:
    """`["lr=0.1", "width=64"]` as a table.

    >>> parse_options(["lr=0.1", "note=a=b"])
    {'lr': '0.1', 'note': 'a=b'}
    """
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise TaskError(f"{shorten(word)} is not an option of the task; write NAME=VALUE, such as lr=0.1")
        options[name] = value
    return options
