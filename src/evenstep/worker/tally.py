"""What the summary of a run says of its steps, counted as they are taken: no rank keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenstep.record import Step


@dataclass
class Tally:
    """The steps of a run so far. A checkpoint holds it: a restart reads none of them again."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    first_samples: int = 0
    first_seconds: float = 0.0
    """Of the first step, which sets things up: speed is that of the others."""
    epoch: int = 0
    epoch_loss: float = 0.0
    """The losses of the last epoch, summed over what each is a mean of."""
    epoch_count: float = 0.0

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Tally:
        """Of steps that were taken already."""
        tally = cls()
        for step in steps:
            tally.add(step)
        return tally

    def add(self, step: Step) -> None:
        """One more."""
        if not self.steps:
            self.first_samples, self.first_seconds = step.samples, step.seconds
        if not self.steps or step.epoch != self.epoch:
            self.epoch, self.epoch_loss, self.epoch_count = step.epoch, 0.0, 0.0
        self.steps += 1
        self.samples += step.samples
        self.seconds += step.seconds
        self.epoch_loss += step.loss * step.count
        self.epoch_count += step.count

    @property
    def train_loss(self) -> float | None:
        """The mean over the samples of the last epoch, or of what was run of it."""
        return self.epoch_loss / (self.epoch_count or 1.0) if self.steps else None

    @property
    def samples_per_second(self) -> float:
        """Of all steps but the first; of that one, if there is no other."""
        if self.steps > 1:
            return (self.samples - self.first_samples) / (self.seconds - self.first_seconds)
        return self.samples / self.seconds if self.steps else 0.0
