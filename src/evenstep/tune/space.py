"""What a study searches: options of the task, each with a range or with choices, from plain text or annotations."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from evenstep.errors import MAX_CHARACTERS, BadInput, TaskError, shorten
from evenstep.plan import OptionValue
from evenstep.task import NO_OPTIONS, Task, TaskFunction
from evenstep.task_options import options_of, read_options, value_in_words

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"\s*({NUMBER})\s*\.\.\s*({NUMBER})\s*(:log)?\s*")
HOW = "write lr=1e-4..1e-1:log, layers=1..4 or width=64,128,256"


@dataclass(frozen=True)
class Dimension:
    """One option that is searched."""

    name: str
    text: str
    """As it was written: `1e-4..1e-1:log`."""
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    choices: tuple[OptionValue, ...] = ()

    @property
    def num_choices(self) -> int | None:
        """How many values it has; None for a range of real numbers."""
        if self.kind == "int" and not self.is_log:
            return int(self.high - self.low) + 1
        return len(self.choices) if self.kind == "choice" else None


def parse_search(
    words: Sequence[str], source: TaskFunction | Task, given: Mapping[str, Any] = NO_OPTIONS
) -> list[Dimension]:
    """The dimensions that --search names; without any, those of the task's own annotations that have no value given."""
    known = {one.name: one.annotation for one in options_of(source)}
    annotated = annotated_searches(source)
    texts: dict[str, str] = {}
    for word in words or [name for name in annotated if name not in given]:
        name, equals, text = (part.strip() for part in word.partition("="))
        if name in texts:
            raise BadInput(f"--search names {shorten(name)} twice; give each option once")
        if name not in known:
            raise BadInput(f"--search {shorten(word)}: {_unknown(name, known)}")
        if name in given:
            raise BadInput(
                f"{shorten(name)} is given ({shorten(f'{name}={value_in_words(given[name])}')}) and searched "
                f"(--search {shorten(word)}); leave one of them out"
            )
        texts[name] = text if equals else annotated.get(name) or _literals(name, known[name])
    if not known:
        raise BadInput(f"nothing to search: {_unknown('', known)}")
    if not texts:
        raise BadInput(f"nothing to search: give --search, such as --search {HOW.removeprefix('write ')}")
    return [parse_dimension(name, text, known[name], source) for name, text in texts.items()]


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    if not known:
        return "the task has no options; give its function parameters: def task(lr: float = 1e-3) -> Task: ..."
    close = difflib.get_close_matches(name[:MAX_CHARACTERS], known, n=1)
    return f"the task has no such option; {f'did you mean {close[0]}? ' if close else ''}It has {', '.join(known)}"


def _literals(name: str, kind: Any) -> str:
    """The choices of an option whose type lists them."""
    if kind is bool:
        return "false,true"
    if get_origin(kind) is Literal:
        return ",".join(map(str, get_args(kind)))
    raise BadInput(f"--search {name} has no range, and the task's annotation of {name} gives none; {HOW}")


def annotated_searches(source: TaskFunction | Task) -> dict[str, str]:
    """What the task's function says: lr: Annotated[float, "1e-4..1e-1:log"] = 1e-3."""
    if isinstance(source, Task):
        return {}
    try:
        hints = get_type_hints(source, include_extras=True)
    except Exception:  # names that only type checkers import
        return {}
    found = {}
    for one in options_of(source):
        hint = hints.get(one.name)
        texts = [more for more in get_args(hint)[1:] if isinstance(more, str)] if get_origin(hint) is Annotated else []
        if texts:
            found[one.name] = texts[0]
    return found


def parse_dimension(name: str, text: str, kind: Any, source: TaskFunction | Task) -> Dimension:
    """`1e-4..1e-1:log`, `1..4`, or choices: `64,128,256`; `1,2|3,4` for lists."""
    if found := RANGE.fullmatch(text):
        return _range(name, text, kind, (found[1], found[2]), is_log=bool(found[3]))
    words = [word.strip() for word in text.split("|" if "|" in text else ",")]
    if ".." in text or not all(words):
        raise BadInput(f"--search {shorten(name)}={shorten(text)} is neither a range nor choices; {HOW}")
    try:
        values = [read_options(source, {name: word})[name] for word in words]
    except TaskError as error:
        # Who lists choices has not mistyped one of the others.
        why, _, _ = str(error).partition("; did you mean")
        raise BadInput(f"--search {shorten(name)}={shorten(text)}: {why}") from error
    choices = tuple(msgspec.to_builtins(value, enc_hook=str) for value in values)
    if len({repr(choice) for choice in choices}) < len(choices):
        raise BadInput(f"--search {shorten(name)}={shorten(text)} has a choice twice; give each once")
    return Dimension(name, text, "choice", choices=choices)


def _range(name: str, text: str, kind: Any, ends: tuple[str, str], is_log: bool) -> Dimension:
    what = f"--search {shorten(name)}={shorten(text)}"
    kinds = {kind, *get_args(kind)}
    if not kinds & {int, float}:
        raise BadInput(f"{what} is a range, and {shorten(name)} is no number; write choices: {shorten(name)}=a,b,c")
    is_int = int in kinds and float not in kinds
    low, high = map(float, ends)
    if is_int and not (low.is_integer() and high.is_integer()):
        raise BadInput(f"{what}: {shorten(name)} is a whole number, and so are the ends of its range")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadInput(f"{what}: the range is empty or has no end; write the smaller number first")
    if is_log and low <= 0:
        raise BadInput(f"{what}: a range with :log begins above 0, such as 1e-4..1e-1:log")
    return Dimension(name, text, "int" if is_int else "float", low, high, is_log)


def grid(space: Sequence[Dimension]) -> list[dict[str, OptionValue]]:
    """All combinations, in the order in which they are written."""
    real = [one.name for one in space if one.num_choices is None]
    if real:
        raise BadInput(f"--sampler grid needs choices, and {shorten(real[0])} is a range; write {real[0]}=A,B,C")
    values = [one.choices if one.kind == "choice" else tuple(range(int(one.low), int(one.high) + 1)) for one in space]
    return [dict(zip((one.name for one in space), found, strict=True)) for found in product(*values)]


def in_words(options: Mapping[str, OptionValue]) -> str:
    """`lr=0.0123, width=64`"""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in options.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())
