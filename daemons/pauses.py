"""Sample calls that are paused between two tokens: what the daemon keeps of them.

It is in memory only. A daemon that is started again has the call from its journal, and runs it
from its beginning, to the same end.
"""

import msgspec

from plexrl_slurm import wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CallId, CauseId, WpgId
from plexrl_slurm.core.messages import Paused, RunEnded


class Pauses:
    """By call, what it had sampled when it was paused last."""

    def __init__(self) -> None:
        self._found: dict[str, list[wire.Sequence]] = {}
        #: Orders that ended so: an agent says again what was not acknowledged, and the call may
        #: have gone on since.
        self._orders: dict[str, set[str]] = {}

    def body(self, call: CallId, sample: wire.Sample | wire.Doomed) -> bytes:
        """What a rank is asked: to begin, or to go on."""
        found = self._found.get(call)
        if found is not None and isinstance(sample, wire.Sample):
            sample = msgspec.structs.replace(sample, resume=found)
        return wire.encode(sample)

    def event(
        self,
        wpg: WpgId,
        call: CallId,
        part: int,
        *,
        ok: bool,
        result: bytes,
        error: str,
        order: str,
    ) -> RunEnded | Paused | None:
        """What the end of a run means; ``None``: it was said before."""
        cause, at_us = CauseId(f"call {call}"), now_us()
        if ok and (paused := wire.decode_paused(result)) is not None:
            if order in self._orders.setdefault(call, set()):
                return None
            self._orders[call].add(order)
            self._found[call] = paused.sequences
            return Paused(
                wpg=wpg, call=call, part=part, tokens=paused.tokens, at_us=at_us, cause=cause
            )
        prefilled = (0, 0)
        if ok and call in self._found:
            output = wire.decode_result(result)
            prefilled = output.prefilled if isinstance(output, wire.SampleOutput) else (0, 0)
        return RunEnded(
            wpg=wpg,
            call=call,
            part=part,
            ok=ok,
            error=error,
            prefilled=prefilled,
            at_us=at_us,
            cause=cause,
        )

    def over(self, call: CallId) -> None:
        """It goes on no more."""
        self._found.pop(call, None)
        self._orders.pop(call, None)
