"""The HTTP border: turns requests into calls of :class:`~plexrl_slurm.api.service.Service`."""
