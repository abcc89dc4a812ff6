"""Many machines, as programs for torchrun know them."""

from __future__ import annotations

from dataclasses import replace

from evenstep.launcher.machines import Machines
from evenstep.launcher.meeting import Place, torchrun_environment


class TorchrunMachines(Machines):
    """The machines of a training, with all of torchrun's names for them."""

    restarts = 0
    num_before = 0
    """Processes of other launchers on this machine that come before this one's, as Slurm starts them."""
    num_here = 0

    def gather(self, num: int, attempt: int, resume: str | None = None) -> Place | None:
        place = super().gather(num, attempt, resume)
        if place is None:
            return None
        given = place.environment
        usual = torchrun_environment(given["MASTER_ADDR"], int(given["MASTER_PORT"]), place.size, self.restarts)
        return replace(
            place,
            local_offset=self.num_before,
            num_local=self.num_here,
            environment={**usual, **given, "TORCHELASTIC_USE_AGENT_STORE": "True"},
        )
