"""What a submission tells the daemon beside a row's own columns. Imports nothing."""


def row_options(
    *, max_slowdown: object = None, qos: object = None, seconds: int | None = None
) -> dict[str, str]:
    """Options of a row; what was not given is left out. ``seconds``: its time limit."""
    given = {
        "max_slowdown": max_slowdown,
        "qos": qos,
        "time_limit_us": None if seconds is None else seconds * 1_000_000,
    }
    return {name: str(said) for name, said in given.items() if said is not None}
