"""Values and decisions. Nothing here does I/O, reads a clock, logs, or draws a random number."""
