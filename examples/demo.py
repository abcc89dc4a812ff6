"""The built-in digits by every strategy on two devices, side by side: what `make demo` shows; and a page of it."""

import subprocess
import sys

import torch
from rich.console import Console

import evenstep

DEVICES = {"single": 1, "dp": 2, "ddp": 2, "fsdp": 2}


def main() -> None:
    console = Console(highlight=False)
    records = []
    for strategy, devices in DEVICES.items():
        console.print(f"[bold]{strategy}[/bold] on {devices} device{'s' * (devices > 1)}")
        records.append(evenstep.train("digits", strategy=strategy, devices=("cpu",) * devices))
    console.print()
    for summary in (record.summary for record in records):
        loss, accuracy = f"train loss {summary.train_loss:.4f}", f"valid accuracy {summary.valid['accuracy']:.4f}"
        console.print(f"{summary.strategy:<7} {loss}  {accuracy}  {summary.samples_per_second:7,.0f} samples/s")
    console.print(f"\nThe same {records[0].summary.samples:,} samples in the same order: one network, four strategies.")
    # Counts mean GPUs where there are any, and this machine may have one.
    compared = "1,2" if not torch.cuda.is_available() else "cpu/cpu,cpu"
    console.print(f"\n[bold]evenstep compare digits --devices {compared}[/bold]")
    subprocess.run([sys.executable, "-m", "evenstep", "compare", "digits", "--devices", compared], check=True)


if __name__ == "__main__":
    main()
