"""Collectives between the processes of one machine, through shared memory."""
