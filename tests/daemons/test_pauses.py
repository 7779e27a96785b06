"""What the daemon keeps of sample calls that are paused."""

from plexrl_slurm import wire
from plexrl_slurm.core.ids import CallId, WpgId
from plexrl_slurm.core.messages import Paused, RunEnded
from plexrl_slurm.daemons.pauses import Pauses

WPG, CALL = WpgId("rollout-0"), CallId("c")
SAMPLE = wire.Sample([1], 2, 9, seed=0)
SOME = [wire.Sequence([4, 5], [-0.5, -0.25], "paused"), wire.Sequence([6], [-1.0], "stop")]


def heard(
    pauses: Pauses, result: wire.RunResult, order: str = "1.1", *, ok: bool = True
) -> RunEnded | Paused | None:
    data = wire.encode(result)
    return pauses.event(WPG, CALL, 0, ok=ok, result=data, error="", order=order)


def test_a_call_that_was_paused_goes_on_from_what_it_had() -> None:
    pauses = Pauses()
    assert pauses.body(CALL, SAMPLE) == wire.encode(SAMPLE)
    event = heard(pauses, wire.Paused(SOME))
    assert isinstance(event, Paused) and event.tokens == 2, "those of what has not ended"
    body = wire.decode_body(pauses.body(CALL, SAMPLE))
    assert isinstance(body, wire.Sample) and body.resume == SOME
    assert wire.decode_body(pauses.body(CallId("other"), SAMPLE)) == SAMPLE


def test_the_end_says_what_going_on_cost() -> None:
    pauses = Pauses()
    heard(pauses, wire.Paused(SOME))
    event = heard(pauses, wire.SampleOutput(SOME, prefilled=(3, 500)), "1.2")
    assert isinstance(event, RunEnded) and event.ok and event.prefilled == (3, 500)
    pauses.over(CALL)
    assert wire.decode_body(pauses.body(CALL, SAMPLE)) == SAMPLE


def test_a_report_that_is_said_again_does_not_stop_the_call_that_goes_on() -> None:
    pauses = Pauses()
    assert heard(pauses, wire.Paused(SOME)) is not None
    assert heard(pauses, wire.Paused(SOME)) is None
    assert heard(pauses, wire.Paused(SOME), "1.2") is not None, "paused a second time"


def test_other_results_are_not_looked_into() -> None:
    event = Pauses().event(WPG, CALL, 1, ok=True, result=b"what it is", error="", order="1.1")
    assert isinstance(event, RunEnded) and event.part == 1 and event.prefilled == (0, 0)
    event = Pauses().event(WPG, CALL, 0, ok=False, result=b"", error="why", order="1.1")
    assert isinstance(event, RunEnded) and not event.ok and event.error == "why"
