"""Where the time of a step goes: spans, torch's profiler."""
