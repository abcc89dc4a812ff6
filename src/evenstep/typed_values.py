"""Reads untrusted text: a file's content becomes a value of a declared type, or one of our errors.

    COMPARISON = Schema(Comparison, "comparison", advice="give the folder of one")
    COMPARISON.read(Path("runs/mine/comparison.json"))

The types are the dataclasses of the rest of the code; limits are part of a field's type: `samples: Natural`.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from evenstep.errors import MAX_CHARACTERS, BadInput, shorten

T = TypeVar("T")
LARGEST = 2**63 - 1
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
"""What `decode` may raise."""


@dataclass(frozen=True)
class Schema(Generic[T]):
    """The type that one kind of text holds, and the error for a text that does not."""

    holds: Any
    """A `type[T]`, or a union, which has no such name."""
    name: str
    """`comparison`, in `x is not a comparison: ...`."""
    error: type[BadInput] = BadInput
    advice: str = ""

    def read(self, path: Path) -> T:
        if not os.path.isfile(path):  # Unlike Path.is_file, it does not raise for a name that is too long.
            raise self.error(f"{shorten(str(path))} does not exist{f'; {self.advice}' if self.advice else ''}")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise self.refusal(path, error.strerror or str(error)) from error
        return self.parse(text, path)

    def parse(self, text: bytes, where: object) -> T:
        """The value of a text that was read from `where`."""
        try:
            return self.decode(text)
        except MALFORMED as error:
            raise self.refusal(where, in_words(error)) from error

    def convert(self, values: Any, where: object) -> T:
        """The value of JSON values that were read from `where`."""
        try:
            return cast(T, msgspec.convert(values, self.holds))
        except MALFORMED as error:
            raise self.refusal(where, in_words(error)) from error

    def decode(self, text: bytes) -> T:
        """The value, or an error of MALFORMED."""
        try:
            return cast(T, self._decoder.decode(text))
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # NaN, infinity and half a surrogate pair are written by Python's json, and read by it alone.
            return cast(T, msgspec.convert(json.loads(text), self.holds))

    def refusal(self, where: object, why: str) -> BadInput:
        advice = f"; {self.advice}" if self.advice else ""
        return self.error(f"{shorten(str(where))} is not a {self.name}: {shorten(why)}{advice}")

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self.holds)


def check_fields(value: Any, error: type[BadInput]) -> None:
    """Raise unless every field of a dataclass has its declared type."""
    for name, hint in _hints(value.__class__).items():
        check(name, getattr(value, name), hint, error)


def check(name: str, given: object, hint: Any, error: type[BadInput]) -> None:
    """Raise unless a value is what a type says."""
    read_value(name.replace("_", "-"), given, hint, error, is_text=False)


def read_value(name: str, given: object, hint: Any, error: type[BadInput], is_text: bool = True) -> Any:
    """A value of this type, from text or JSON; the error lists its Literals, or gives the description of its limits."""
    is_bool = hint is bool or {*get_args(hint)} == {bool, type(None)}
    if is_text and is_bool and isinstance(given, str):
        given = WORDS.get(given.lower(), given)
    try:
        return msgspec.convert(given, hint, strict=not is_text, dec_hook=_path)
    except (msgspec.ValidationError, UnicodeEncodeError) as wrong:
        # The latter is for half of a surrogate pair, which JSON may hold.
        shown = shorten(repr(given))
        choices = get_args(hint) if get_origin(hint) is not Literal else (hint,)
        for choice in choices:
            if get_origin(choice) is Literal:
                raise error(f"{name} is {shown}; {_allowed(given, get_args(choice))}") from None
        if is_bool and isinstance(given, str):
            raise error(f"{name} is {shown}; write true or false{' (or yes, no, on, off)' * is_text}") from None
        meta = [one for choice in (hint, *choices) for one in get_args(choice) if isinstance(one, Meta)]
        advice = meta[0].description if meta else (is_text and _number_advice(given, hint)) or _why(wrong)
        raise error(f"{name} is {shown}; {advice}") from None


def _number_advice(given: object, hint: Any) -> str:
    """For a text that was to be a number."""
    kinds = {hint, *get_args(hint)}
    if not isinstance(given, str) or not kinds & {int, float}:
        return ""
    return "write a number, such as 0.1" if float in kinds else "write a whole number, such as 4"


def _why(wrong: Exception) -> str:
    return in_words(wrong) if isinstance(wrong, msgspec.ValidationError) else "write plain text"


WORDS = {"yes": True, "on": True, "no": False, "off": False}
"""Further ways to write a bool on a command line."""


def _path(kind: type, given: Any) -> Path:
    if kind is not Path:
        raise NotImplementedError(f"a {kind.__name__} cannot be written as text")
    return Path(given)


def check_choice(name: str, given: object, allowed: Iterable[str], error: type[BadInput]) -> None:
    """Raise unless a value is one of the allowed names."""
    names = list(allowed)
    if given not in names:
        raise error(f"unknown {name} {shorten(repr(given))}; {_allowed(given, names)}")


def read_variables(kind: type[T], environment: Mapping[str, str]) -> T:
    """Environment variables as a dataclass whose fields have the same names; an empty variable counts as not set."""
    hints = _hints(cast(Any, kind))
    given = {name: environment[name] for name in hints if environment.get(name)}
    for name, text in given.items():
        try:
            msgspec.convert(text, hints[name], strict=False)
        except msgspec.ValidationError as wrong:
            raise BadInput(
                f"the variable {name} is {shorten(repr(text))}: {in_words(wrong)}; correct or unset it"
            ) from None
    return msgspec.convert(given, kind, strict=False)


def _allowed(given: object, names: Sequence[object]) -> str:
    """`choose auto or off; did you mean off?`"""
    *most, last = map(str, names)
    close = difflib.get_close_matches(str(given)[:MAX_CHARACTERS], list(map(str, names)), n=2)
    choose = f"choose {', '.join(most)} or {last}" if most else f"the only choice is {last}"
    return choose + (f"; did you mean {' or '.join(close)}?" if close else "")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def in_words(error: Exception) -> str:
    """Which field is wrong, and what it should be.

    >>> in_words(msgspec.ValidationError("Expected `int`, got `str` - at `$.rows[0].steps`"))
    'rows[0].steps: expected int, got str'
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, msgspec.ValidationError):
        return f"it is not JSON ({error})"
    what, _, path = str(error).replace("`", "").partition(" - at $")
    what = what.removeprefix("Object ")
    what = what[:1].lower() + what[1:]
    return f"{path.lstrip('.')}: {what}" if path else what
