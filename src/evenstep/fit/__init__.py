"""Does a step fit in memory, with which micro-batch, and what would make it fit?

memory_model    bytes by kind as lines in the micro-batch, what a strategy makes of them, and the choice; no torch
fake_tensor_pass one step without data or memory: fake tensors, of which every storage is counted
device_memory   what a process may use of a device, and what it used
memory_probe    a few real steps in a fresh process, and what they took
fit_table       what `evenstep fit` prints; no torch
"""
