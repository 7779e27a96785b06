"""``plexrl``: thin commands; each reads flags, calls one function, prints one answer."""
