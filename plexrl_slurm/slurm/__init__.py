"""Slurm: scripts and words in and out, and the port with its adapters."""
