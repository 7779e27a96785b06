"""Structured logs: an action anyone can grep for, and its facts."""

import logging


def say(log: logging.Logger, action: str, **facts: object) -> None:
    """``say(log, "switch_ended", wpg=w, bytes=n)``."""
    text = " ".join(f"{name}={value}" for name, value in facts.items())
    log.info("%s %s", action, text, extra={"action": action, "facts": facts})


def set_up(level: str = "INFO") -> None:
    """Log to standard error, UTC, one line per action."""
    import time

    handler = logging.StreamHandler()
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s")
    formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "uvicorn.access", "asyncio", "DeepSpeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
