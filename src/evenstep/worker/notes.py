"""What is known about an error, written on the error itself: where it happened, and what helps."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.worker.answers import Situation, answer

_STEP, _ANSWER = "at step ", "What helps: "


def note(error: BaseException, step: int, names: Sequence[str], situation: Situation | None = None) -> None:
    """Write where an error happened, and what is known to help, on the error itself: its traceback shows both."""
    error.add_note(f"{_STEP}{step}")
    text = answer(error, names, situation)
    if text:
        error.add_note(f"{_ANSWER}{text}")


def step_noted(error: BaseException) -> int:
    """The step that `note` wrote; 0 if none."""
    return next((int(one.removeprefix(_STEP)) for one in _notes(error) if one.startswith(_STEP)), 0)


def answer_noted(error: BaseException) -> str | None:
    """The answer that `note` wrote."""
    return next((one.removeprefix(_ANSWER) for one in _notes(error) if one.startswith(_ANSWER)), None)


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))
