"""What the words on a page mean."""

from __future__ import annotations

OF_RUNS = {
    "loss": "the mean over the whole global batch of each step; in the table, over the last epoch once a run has ended",
    "samples/s": "samples of a step over its seconds; evaluation, checkpoints and start-up are not in it",
    "wait for input": "what of a step went by before its batch was there",
    "peak memory": "the most a device held; on a CPU that of the whole process, with torch itself in it",
}

OF_COMPARISONS = {
    "samples/s": "the middle of all rounds; below it the slowest and the fastest round",
    "speed-up": "samples per second over those of the first row",
    "efficiency": "speed-up for each device: 100 % means that no device waited",
    "input": "waiting for the batch of the step",
    "forward, backward": "the model's own work, on the device; the mean of all ranks, as all parts are",
    "communication": "sending gradients (and parameters, where those travel) that was not hidden behind backward",
    "optimizer": "changing the weights",
    "without input": "the same step on a batch that is there already: the most that faster input could give",
    "without communication": "the same step when nothing is sent: the most that faster links could give",
    "peak memory": OF_RUNS["peak memory"],
    "sent a step": "bytes that each rank hands over in a step",
    "start-up": "from the start of the processes to the end of the first step",
    "learns the same": "whether losses and weights are those of one device, within rounding; if not, it is not advised",
}
