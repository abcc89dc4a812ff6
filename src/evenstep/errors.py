"""Every error that a user can get, with the exit code of the command.

    EvenstepError
    ├── BadInput                exit 2: the request cannot be carried out; nothing was started
    │   ├── TaskError           the task: not found, does not import, its loss or data do not fit
    │   ├── PlanError           the plan: an unknown strategy, a batch that cannot be split, too few devices
    │   └── CheckpointError     the checkpoint: not one, damaged, from another model or a newer version
    ├── TrainingError           exit 1: it started and could not continue
    │   ├── NonFiniteLoss       the loss became NaN or infinite; all ranks stopped before the weights changed
    │   ├── SaveFailed          a checkpoint could not be written; earlier ones are unchanged
    │   ├── RankLost            another rank of this machine ended while this one waited for it
    │   ├── WorkerFailed        a worker process failed; the message holds the first cause
    │   └── Stalled             exit 124: no progress; the message names the rank that the other ranks waited for
    └── Preempted               exit 75: stopped by SIGTERM or SIGUSR1, after a checkpoint

A message names what was given, what is allowed and what to do next, in one or two lines.
"""

STOPPED = 130
"""The exit code after Ctrl-C, as in a shell."""
MAX_CHARACTERS = 200
BREAKS_LINES = "\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
"""Control characters, line ends, and surrogates, which no file can hold; for a regular expression."""


def shorten(text: str, most: int = MAX_CHARACTERS) -> str:
    """The beginning and the end of a long text.

    >>> len(shorten("a" * 5000))
    200
    """
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[len(text) - half - 1 :]}"


class EvenstepError(Exception):
    """Base class of all errors."""

    exit_code = 1
    is_final = False
    """Whether a restart would fail in the same way."""


class BadInput(EvenstepError):
    """The request cannot be carried out; nothing was started."""

    exit_code = 2
    is_final = True


class TaskError(BadInput):
    """The task cannot be found, imported or trained."""


class PlanError(BadInput):
    """The plan contradicts itself, the machine or the data."""


class CheckpointError(BadInput):
    """The checkpoint is damaged, foreign or from another model."""


class TrainingError(EvenstepError):
    """The training started and could not continue."""


class NonFiniteLoss(TrainingError):
    """The loss is NaN or infinite; the weights are those of the step before."""

    is_final = True


class SaveFailed(TrainingError):
    """A checkpoint could not be written; a full disk would stop the next attempt, too."""

    is_final = True


class RankLost(TrainingError):
    """Another rank ended first, and reports the cause."""


class WorkerFailed(TrainingError):
    """A worker process ended early."""


class Stalled(TrainingError):
    """No rank made progress."""

    exit_code = 124


class Preempted(EvenstepError):
    """The training received a stop signal, and saved a checkpoint at a common step."""

    exit_code = 75
