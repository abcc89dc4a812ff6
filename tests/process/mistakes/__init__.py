"""Tasks with one mistake each; `verify` must find it and name it."""
