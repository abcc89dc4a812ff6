"""Every error a user can meet, and the exit code each one ends a command with.

    EvenstepError
    ├── BadInput                exit 2: what was asked cannot be done; nothing was started
    │   ├── TaskError           the task: not found, does not import, its loss or data do not fit
    │   ├── PlanError           the plan: an unknown strategy, a batch that cannot be cut up, too few devices
    │   └── CheckpointError     the checkpoint: not one, damaged, from another model or a newer version
    ├── TrainingError           exit 1: it started and could not go on
    │   ├── NonFiniteLoss       the loss became NaN or infinite; all ranks stopped before the weights were touched
    │   ├── SaveFailed          a checkpoint could not be written; those before it are as they were
    │   ├── RankLost            another rank of this machine ended while this one waited for it
    │   ├── WorkerFailed        a worker process failed; the message holds the first cause
    │   └── Stalled             exit 124: nothing moved any more; the message names who the others waited for
    └── Preempted               exit 75: asked to stop by SIGTERM or SIGUSR1, and saved

A message says what was given, what is allowed and what to do next, in one or two lines.
"""

STOPPED = 130
"""The exit code after Ctrl-C, as in a shell."""
MAX_CHARACTERS = 200
BREAKS_LINES = "\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
"""Characters that a terminal obeys, that end a line, or that no file can be written with; for a regular expression."""


def shorten(text: str, most: int = MAX_CHARACTERS) -> str:
    """What is given may be very long; its beginning and its end tell what it is.

    >>> len(shorten("a" * 5000))
    200
    """
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[len(text) - half - 1 :]}"


class EvenstepError(Exception):
    """Anything evenstep says no to."""

    exit_code = 1
    is_final = False
    """Whether it would come again, however often the training is started."""


class BadInput(EvenstepError):
    """What was asked cannot be done; nothing was started."""

    exit_code = 2
    is_final = True


class TaskError(BadInput):
    """The task cannot be found, imported or trained."""


class PlanError(BadInput):
    """The plan contradicts itself, the machine or the data."""


class CheckpointError(BadInput):
    """The checkpoint is damaged, foreign or from another model."""


class TrainingError(EvenstepError):
    """The training started and could not go on."""


class NonFiniteLoss(TrainingError):
    """The loss is NaN or infinite; the weights are those of the step before."""

    is_final = True


class SaveFailed(TrainingError):
    """A checkpoint could not be written: a disk that is full is full for the next attempt, too."""

    is_final = True


class RankLost(TrainingError):
    """Another rank ended first, and has the cause."""


class WorkerFailed(TrainingError):
    """A worker process ended early."""


class Stalled(TrainingError):
    """Nothing moved any more."""

    exit_code = 124


class Preempted(EvenstepError):
    """The training was asked to stop, agreed on a step and saved it."""

    exit_code = 75
