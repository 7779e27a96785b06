"""Host-memory tier: slabs, images and checkpoints as files."""
