"""PlexRL for Slurm: time-share held GPUs among RLVR jobs."""

__version__ = "0.1.0"
