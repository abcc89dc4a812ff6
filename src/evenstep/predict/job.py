"""A whole job: the steps of its epochs, and what comes between them: evaluation, checkpoints, failures."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.record import Record, Tally

LEAST_USEFUL = 0.05
"""Of an epoch's time: with more failures than that, a job would never end."""


@dataclass(frozen=True, kw_only=True)
class WholeJob:
    """What a run does besides its steps, as its Record has it."""

    samples: int
    """Of an epoch."""
    evaluation_device_seconds: float = 0.0
    """Of an epoch; devices share it."""
    checkpoint_seconds: float | None = None
    """Of an epoch: what its steps and evaluations do not take; None where no training was recorded."""
    start_seconds: float = 0.0
    """The first step, which sets up what all others use; a restart takes it again."""
    steps_between_checkpoints: int | None = None
    """None: one at the end of each epoch."""
    epochs: float | None = None
    """Of its plan."""

    @classmethod
    def of(cls, record: Record) -> WholeJob | None:
        """None where the length of an epoch is not known."""
        samples = record.data.get("rest")
        if not samples:
            return None
        evaluation = record.evaluations[-1].seconds * len(record.plan.devices) if record.evaluations else 0.0
        job = cls(samples=samples, evaluation_device_seconds=evaluation)
        if record.summary is None or record.measurement is not None or not record.steps:
            return job
        tally, plan = Tally.of(record.steps), record.plan
        between = record.summary.seconds - tally.seconds - sum(one.seconds for one in record.evaluations)
        planned = plan.steps * plan.batch / samples if plan.steps else None
        return cls(
            samples=samples,
            evaluation_device_seconds=evaluation,
            checkpoint_seconds=max(0.0, between) * samples / max(1, tally.samples),
            start_seconds=tally.first_seconds,
            steps_between_checkpoints=plan.checkpoint_every,
            epochs=plan.epochs or planned,
        )

    def epoch_parts(
        self, rate: float, batch: float, devices: int, hours_between_failures: float | None
    ) -> dict[str, float]:
        """The seconds of an epoch at this rate of samples a second, by what they are spent on."""
        parts = {
            "steps": self.samples / rate,
            "evaluation": self.evaluation_device_seconds / devices,
            "checkpoints": self.checkpoint_seconds or 0.0,
        }
        if hours_between_failures is None:
            return parts
        useful = sum(parts.values())
        interval = useful
        if self.steps_between_checkpoints is not None:
            interval = min(interval, self.steps_between_checkpoints * batch / rate)
        # A failure loses what was done since the last checkpoint, on average half of what lies between two.
        lost = devices / (3600 * hours_between_failures) * (interval / 2 + self.start_seconds)
        return {**parts, "restarts": useful / max(LEAST_USEFUL, 1 - lost) - useful}
