"""Checkpoints: files on disk, and the state that goes in and out of any strategy."""
