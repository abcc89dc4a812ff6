"""The built-in digits by every strategy on two devices, side by side: what `make demo` shows."""

from rich.console import Console

import evenstep
from evenstep.report.table import side_by_side

DEVICES = {"single": 1, "dp": 2, "ddp": 2, "fsdp": 2}

console = Console(highlight=False)
records = []
for strategy, devices in DEVICES.items():
    console.print(f"[bold]{strategy}[/bold] on {devices} device{'s' * (devices > 1)}")
    records.append(evenstep.train("digits", strategy=strategy, devices=("cpu",) * devices))
console.print()
console.print(side_by_side(records))
console.print(f"\nThe same {records[0].summary.samples:,} samples in the same order: one network, learned four ways.")
