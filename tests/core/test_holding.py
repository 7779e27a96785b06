"""Each sentence about holds, one case."""

from dataclasses import replace
from typing import Any

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.holding import (
    Demand,
    Drain,
    Extend,
    Fault,
    HoldAction,
    HoldPhase,
    HoldRules,
    HoldView,
    Release,
    Renewal,
    Submit,
    Undrain,
    decide,
    excluded,
    next_look_us,
    rest_until_us,
)

SECOND = 1_000_000
NOW = 100_000 * SECOND
LIMIT = 3_600 * SECOND
#: Renewed 900 s before the limit, last call at 300 s.
RULES = HoldRules(min=1, max=2, time_limit_us=LIMIT)
NOBODY = Demand()
REPLACE = replace(RULES, renewal=Renewal.REPLACE)
ELASTIC = replace(RULES, max=3, idle_release_us=600 * SECOND)


def up(
    name: str = "h1", *, left_s: int = 3_000, idle_s: int | None = None, **given: Any
) -> HoldView:
    """A whole, ready hold in use, or idle since ``idle_s``."""
    started_us = NOW - (LIMIT - left_s * SECOND)
    fields: dict[str, Any] = {
        "phase": HoldPhase.RUNNING,
        "submitted_us": started_us - SECOND,
        "started_us": started_us,
        "limit_end_us": NOW + left_s * SECOND,
        "ready": True,
        "in_use": idle_s is None,
        "idle_since_us": None if idle_s is None else NOW - idle_s * SECOND,
    }
    return HoldView(id=name, **(fields | given))


def pending(name: str = "h2", *, for_s: int = 10, **given: Any) -> HoldView:
    return HoldView(id=name, phase=HoldPhase.PENDING, submitted_us=NOW - for_s * SECOND, **given)


def waits(seconds: int = 60, *, homeless: bool = False) -> Demand:
    return Demand(waiting_since_us=NOW - seconds * SECOND, homeless=homeless)


def ending(view: HoldView) -> HoldView:
    return replace(view, phase=HoldPhase.ENDING)


SUBMIT = Submit(reason="")


def to_replace(name: str) -> Submit:
    return Submit(replaces=name, reason="")


def drain(name: str) -> Drain:
    return Drain(hold=name, reason="")


def release(name: str) -> Release:
    return Release(hold=name, reason="")


def undrain(name: str) -> Undrain:
    return Undrain(hold=name, reason="")


def extend(name: str, limit_us: int) -> Extend:
    return Extend(hold=name, limit_us=limit_us, reason="")


Case = tuple[str, HoldRules, list[HoldView], Demand, list[HoldAction]]
_DRAINING: dict[str, Any] = {"draining": True}
_DRAINED: dict[str, Any] = {"draining": True, "drained": True, "idle_s": 1}

#: All could leave it since then.
_LEFT: dict[str, Any] = {"vacant_since_us": NOW - 600 * SECOND}

VACANT: list[Case] = [
    ("a hold that all could leave for long is drained", ELASTIC, [up(), up("h2", **_LEFT)], NOBODY,
     [drain("h2")]),
    ("all could leave it, but not for long yet", replace(ELASTIC, idle_release_us=601 * SECOND),
     [up(), up("h2", **_LEFT)], NOBODY, []),
    ("one that is empty goes first, and only that", ELASTIC,
     [up("h1", **_LEFT), up("h2", idle_s=601), up("h3")], NOBODY, [drain("h2")]),
    ("an empty one that stays for a while keeps the other", ELASTIC,
     [up("h1", **_LEFT), up("h2", idle_s=1), up("h3")], NOBODY, []),
    ("one at a time", ELASTIC, [up("h1", **_LEFT), up("h2", **_LEFT), up("h3")], NOBODY,
     [drain("h1")]),
    ("not while somebody waits", ELASTIC, [up(), up("h2", **_LEFT)], waits(1), []),
    ("not below the least", replace(ELASTIC, min=2), [up(), up("h2", **_LEFT)], NOBODY, []),
    ("not where idle ones stay", replace(ELASTIC, idle_release_us=0),
     [up(), up("h2", **_LEFT)], NOBODY, []),
    ("it is not renewed meanwhile", ELASTIC, [up(), up("h2", left_s=800, **_LEFT)],
     NOBODY, [drain("h2")]),
    ("one that is being replaced is its successor's", ELASTIC,
     [up(), up("h2", left_s=800, **_LEFT), pending("h3", replaces="h2")], NOBODY, []),
    ("of too many one that all can leave goes before its time", replace(RULES, max=1),
     [up("h1"), up("h2", left_s=2_000, vacant_since_us=NOW)], NOBODY, [drain("h2")]),
]  # fmt: skip

HOW_MANY: list[Case] = [
    ("nothing is held: the least is asked for at once", replace(RULES, min=2), [], NOBODY,
     [SUBMIT, SUBMIT]),
    ("a pending one counts", RULES, [pending()], NOBODY, []),
    ("a requeued one counts as pending", RULES, [pending("h1", for_s=9_999)], NOBODY, []),
    ("one that ends does not count", RULES, [ending(up())], NOBODY, [SUBMIT]),
    ("no hold is wanted and none is asked for", replace(RULES, min=0), [], NOBODY, []),
    ("a hold and its pending replacement count once", RULES,
     [up(left_s=800), pending(replaces="h1")], NOBODY, []),
    ("demand has not waited long enough", RULES, [up()], waits(59), []),
    ("demand has waited", RULES, [up()], waits(60), [SUBMIT]),
    ("one at a time", ELASTIC, [up(), pending()], waits(999), []),
    ("the first has started and is not ready", ELASTIC, [up(), up("h2", ready=False)], waits(999),
     []),
    ("an empty one is there for who waits", ELASTIC, [up(), up("h2", idle_s=5)], waits(999), []),
    ("never more than the most", RULES, [up(), up("h2")], waits(999, homeless=True), []),
    ("the homeless do not wait", RULES, [up()], Demand(homeless=True), [SUBMIT]),
    ("the homeless wait for what comes", RULES, [up(), pending()], Demand(homeless=True), []),
    ("with demand the least is not exceeded by two at once", replace(RULES, min=1), [],
     waits(99), [SUBMIT]),
    ("a draining hold keeps its place under the most", replace(REPLACE, max=1),
     [up(left_s=100, **_DRAINING)], NOBODY, []),
]  # fmt: skip

FEWER: list[Case] = [
    ("idle, but not for long", ELASTIC, [up(), up("h2", idle_s=599)], NOBODY, []),
    ("idle for long", ELASTIC, [up(), up("h2", idle_s=600)], NOBODY, [drain("h2")]),
    ("never while demand waits", ELASTIC, [up(), up("h2", idle_s=600)], waits(1), []),
    ("never if the site says so", RULES, [up(), up("h2", idle_s=99_999)], NOBODY, []),
    ("never below the least", ELASTIC, [up(idle_s=600)], NOBODY, []),
    ("the youngest first", ELASTIC,
     [up(idle_s=900, left_s=2_000), up("h2", idle_s=900, left_s=3_000)], NOBODY, [drain("h2")]),
    ("the one that had to be renewed before the youngest", ELASTIC,
     [up(idle_s=900, left_s=800), up("h2", idle_s=900)], NOBODY, [drain("h1")]),
    ("all that are too many", ELASTIC, [up(), up("h2", idle_s=900), up("h3", idle_s=900)], NOBODY,
     [drain("h2"), drain("h3")]),
    ("drained", ELASTIC, [up(), up("h2", **_DRAINED)], NOBODY, [release("h2")]),
    ("still draining", ELASTIC, [up(), up("h2", **_DRAINING)], NOBODY, []),
    ("already ending", ELASTIC, [up(), ending(up("h2", **_DRAINED))], NOBODY, []),
    ("drained, and wanted again", ELASTIC, [up(), up("h2", **_DRAINED)], waits(1),
     [undrain("h2")]),
    ("drained, and the least is not reached", RULES, [up(**_DRAINED)], NOBODY, [undrain("h1")]),
    ("pending, and nobody has needed it for long", ELASTIC, [up(), pending(for_s=600)], NOBODY,
     [release("h2")]),
    ("pending, and needed", ELASTIC, [up(), pending(for_s=600)], waits(1), []),
    ("the most was lowered: the pending one goes", replace(RULES, max=1), [up(), pending()], NOBODY,
     [release("h2")]),
    ("the most was lowered: used ones stay until their limit is near", replace(RULES, max=1),
     [up(), up("h2", left_s=301)], NOBODY, []),
    ("the most was lowered: then they are drained", replace(RULES, max=1, renewal=Renewal.REPLACE),
     [up(left_s=300), up("h2", left_s=299)], NOBODY, [drain("h2"), to_replace("h1"), drain("h1")]),
    ("the most was lowered: a draining one is not wanted back", replace(RULES, max=1),
     [up(), up("h2", **_DRAINED)], waits(1), [release("h2")]),
    ("an empty one that nears its limit has no room",
     replace(RULES, min=0, renewal=Renewal.EXTEND),
     [up(left_s=290, idle_s=5, extend_refused=True)], waits(), [drain("h1"), SUBMIT]),
    ("one that starts and drains does not come", replace(REPLACE, min=0),
     [up(ready=False, left_s=200, **_DRAINING)], waits(), [SUBMIT]),
    ("an idle one too many is not renewed", ELASTIC, [up(), up("h2", idle_s=5, left_s=800)], NOBODY,
     []),
]  # fmt: skip

RENEWAL: list[Case] = [
    ("not yet near its limit", RULES, [up(left_s=901)], NOBODY, []),
    ("extended by a full period from now", RULES, [up(left_s=900)], NOBODY,
     [extend("h1", 2_700 * SECOND + LIMIT)]),
    ("asked once", RULES, [up(left_s=900, extending=True)], NOBODY, []),
    ("refused: replaced", RULES, [up(left_s=900, extend_refused=True)], NOBODY,
     [to_replace("h1")]),
    ("only replaced", REPLACE, [up(left_s=900)], NOBODY, [to_replace("h1")]),
    ("replaced once", REPLACE, [up(left_s=500), pending(replaces="h1")], NOBODY, []),
    ("another one is submitted if the replacement is gone", REPLACE,
     [up(left_s=500), ending(pending(replaces="h1"))], NOBODY, [to_replace("h1")]),
    ("replaced beyond the most", replace(REPLACE, max=1), [up(left_s=900)], NOBODY,
     [to_replace("h1")]),
    ("the replacement starts", REPLACE, [up(left_s=500), up("h2", replaces="h1", ready=False)],
     NOBODY, []),
    ("the replacement is ready", REPLACE, [up(left_s=500), up("h2", replaces="h1", idle_s=1)],
     NOBODY, [drain("h1")]),
    ("moving", REPLACE, [up(left_s=500, **_DRAINING), up("h2", replaces="h1")], NOBODY, []),
    ("moved", REPLACE, [up(left_s=500, **_DRAINED), up("h2", replaces="h1")], NOBODY,
     [release("h1")]),
    ("moved, and demand does not bring the old one back", REPLACE,
     [up(left_s=500, **_DRAINED), up("h2", replaces="h1")], waits(1), [release("h1")]),
    ("the replacement is ready, and draining by mistake", REPLACE,
     [up(left_s=500), up("h2", replaces="h1", **_DRAINED)], NOBODY, [undrain("h2")]),
    ("moving, and Slurm requeues the old one", REPLACE,
     [pending("h1", draining=True), up("h2", replaces="h1")], NOBODY, [release("h1")]),
    ("the replacement died on the way", REPLACE,
     [up(left_s=500, **_DRAINING), ending(up("h2", replaces="h1"))], NOBODY, [undrain("h1")]),
    ("full cluster: not yet the last call", REPLACE, [up(left_s=301), pending(replaces="h1")],
     NOBODY, []),
    ("full cluster: last call", REPLACE, [up(left_s=300), pending(replaces="h1")], NOBODY,
     [drain("h1")]),
    ("full cluster: given back", REPLACE, [up(left_s=290, **_DRAINED), pending(replaces="h1")],
     Demand(homeless=True), [release("h1")]),
    ("full cluster: the replacement is an ordinary hold then", REPLACE, [pending(replaces="h1")],
     Demand(homeless=True), []),
    ("the site's own last call", replace(REPLACE, last_call_us=120 * SECOND),
     [up(left_s=121), pending(replaces="h1")], NOBODY, []),
    ("Slurm has not answered yet at the last call", RULES, [up(left_s=300)], NOBODY,
     [extend("h1", 3_300 * SECOND + LIMIT)]),
    ("Slurm has not answered: work is saved", RULES, [up(left_s=150)], NOBODY,
     [extend("h1", 3_450 * SECOND + LIMIT), drain("h1")]),
    ("saved in vain: it is still extended", RULES, [up(left_s=100, **_DRAINED)], NOBODY,
     [extend("h1", 3_500 * SECOND + LIMIT)]),
    ("extended at last: used again", RULES, [up(left_s=3_000, **_DRAINED)], NOBODY,
     [undrain("h1")]),
    ("only extended, refused: nothing is asked for beside it",
     replace(RULES, renewal=Renewal.EXTEND), [up(left_s=500, extend_refused=True)], NOBODY, []),
    ("only extended, refused: given back in time", replace(RULES, renewal=Renewal.EXTEND),
     [up(left_s=300, extend_refused=True)], NOBODY, [drain("h1")]),
    ("without a limit", RULES, [up(limit_end_us=None)], NOBODY, []),
    ("a limit that nobody asked for cannot be raised", replace(RULES, time_limit_us=None),
     [up(left_s=800)], NOBODY, [to_replace("h1")]),
    ("the replacement of one that nobody needs any more", replace(ELASTIC, min=0),
     [up(idle_s=600, left_s=800), pending(replaces="h1")], NOBODY, [release("h2")]),
]  # fmt: skip

_LOST: dict[str, Any] = {"whole": False, "lost_nodes": 1}

LOSS: list[Case] = [
    ("shrunk, but of use", RULES, [up(**_LOST)], NOBODY, []),
    ("shrunk: not extended but replaced", RULES, [up(left_s=900, **_LOST)], NOBODY,
     [to_replace("h1")]),
    ("shrunk: replaced even where holds are only extended",
     replace(RULES, renewal=Renewal.EXTEND), [up(left_s=900, **_LOST)], NOBODY,
     [to_replace("h1")]),
    ("its batch script is gone: replaced at once", RULES, [up(batch_lost=True, **_LOST)], NOBODY,
     [to_replace("h1")]),
    ("its batch script is gone: used until then", RULES,
     [up(batch_lost=True, **_LOST), pending(replaces="h1", for_s=9_999)], NOBODY, []),
    ("its batch script is gone: moved then", RULES,
     [up(batch_lost=True, **_LOST), up("h2", replaces="h1")], NOBODY, [drain("h1")]),
    ("useless: replaced at once, and used until then", RULES, [up(useless=True, **_LOST)],
     Demand(homeless=True), [to_replace("h1")]),
    ("useless and empty: its GPUs are given back at once", RULES,
     [up(useless=True, idle_s=1, **_LOST)], NOBODY, [to_replace("h1"), drain("h1")]),
    ("useless, and its replacement may need its GPUs", RULES,
     [up(useless=True, **_LOST), pending(replaces="h1", for_s=300)], NOBODY, [drain("h1")]),
    ("useless: never used again", RULES, [up(useless=True, **_LOST, **_DRAINED)], waits(),
     [release("h1"), SUBMIT]),
    ("useless before the old one is gone: given back", REPLACE,
     [up(left_s=500), up("h2", replaces="h1", useless=True, ready=False, **_LOST)], NOBODY,
     [drain("h2")]),
    ("without its batch script before the old one is gone: not replaced yet", REPLACE,
     [up(left_s=500, **_DRAINING), up("h2", replaces="h1", batch_lost=True, **_LOST)], NOBODY, []),
    ("broken, and nobody needs it: not replaced", ELASTIC,
     [up(), up("h2", batch_lost=True, idle_s=5, **_LOST)], NOBODY, [drain("h2")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "holds", "demand", "actions"),
    [pytest.param(*case[1:], id=case[0]) for case in [*HOW_MANY, *FEWER, *VACANT, *RENEWAL, *LOSS]],
)
def test_decision(
    rules: HoldRules, holds: list[HoldView], demand: Demand, actions: list[HoldAction]
) -> None:
    assert list(decide(NOW, holds, demand, rules)) == actions
    assert list(decide(NOW, holds[::-1], demand, rules)) == actions


def test_nothing_is_submitted_while_failures_rest() -> None:
    later = NOW + SECOND
    old = up(left_s=299)
    assert decide(NOW, [], NOBODY, RULES, not_before_us=later) == ()
    assert decide(NOW, [up()], waits(), RULES, not_before_us=later) == ()
    assert decide(NOW, [old], NOBODY, REPLACE, not_before_us=later) == (drain("h1"),)
    assert decide(later, [], NOBODY, RULES, not_before_us=later) == (SUBMIT,)
    assert next_look_us(NOW, [], NOBODY, RULES, not_before_us=later) == later


@pytest.mark.parametrize(
    ("holds", "demand", "seconds"),
    [
        pytest.param([], NOBODY, None, id="nothing can change"),
        pytest.param([], waits(20), 40, id="demand has waited long enough"),
        pytest.param([up(left_s=1_000)], NOBODY, 100, id="renewal"),
        pytest.param([up(left_s=400)], NOBODY, 100, id="last call"),
        pytest.param([up(left_s=200)], NOBODY, 50, id="Slurm's last chance to extend"),
        pytest.param([up(idle_s=500)], NOBODY, 100, id="idle for long"),
        pytest.param([up(vacant_since_us=NOW - 500 * SECOND)], NOBODY, 100, id="all could leave"),
        pytest.param([pending(for_s=550)], NOBODY, 50, id="pending for long"),
        pytest.param([pending(for_s=250)], NOBODY, 50, id="a useless one waits long enough"),
    ],
)
def test_next_look(holds: list[HoldView], demand: Demand, seconds: int | None) -> None:
    found = next_look_us(NOW, holds, demand, ELASTIC)
    assert found == (None if seconds is None else NOW + seconds * SECOND)


@pytest.mark.parametrize(
    ("holds", "demand", "rules", "sentence"),
    [
        ([], NOBODY, RULES, "there are fewer holds than hold.min = 1"),
        ([up()], waits(), RULES, "jobs wait for WPGs that one more hold gives"),
        (
            [up(left_s=9)],
            NOBODY,
            REPLACE,
            "hold h1 is to be replaced: its time limit is 900 s away",
        ),
        (
            [up(left_s=9), pending(replaces="h1", pending_reason="Resources")],
            NOBODY,
            REPLACE,
            "hold h1 is drained: its time limit is near, and hold h2, which replaces it, is still "
            "pending (Resources) and may start on the GPUs that it gives back",
        ),
        (
            [up(useless=True, **_LOST)],
            NOBODY,
            RULES,
            "hold h1 is to be replaced: it has no WPG of one of its pools, because it lost 1 node",
        ),
        (
            [up(), up("h2", idle_s=600)],
            NOBODY,
            ELASTIC,
            "hold h2 is drained: nothing has needed it for 600 s",
        ),
    ],
)
def test_reasons_are_sentences(
    holds: list[HoldView], demand: Demand, rules: HoldRules, sentence: str
) -> None:
    assert decide(NOW, holds, demand, rules)[0].reason == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min": 2}, "hold.min is 2 and hold.max is 1: write 0 <= min <= max"),
        ({"renew_before_us": LIMIT, "time_limit_us": LIMIT}, "lower it, or raise the limit"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        HoldRules(**given)


def fault(node: str, seconds: int) -> Fault:
    return Fault(node=node, at_us=NOW + seconds * SECOND, reason="agent died")


@pytest.mark.parametrize(
    ("faults", "at_s", "until_s"),
    [
        pytest.param([0, 10], 10, None, id="too few"),
        pytest.param([0, 10, 20], 20, 120, id="enough: left out since the last"),
        pytest.param([20, 0, 10], 20, 120, id="in any order"),
        pytest.param([0, 10, 20], 119, 120, id="still left out when the first is long ago"),
        pytest.param([0, 10, 20], 120, None, id="used again"),
        pytest.param([0, 10, 101], 101, None, id="too far apart"),
        pytest.param([0, 10, 20, 300], 300, None, id="one after its time"),
        pytest.param([0, 10, 20, 90], 121, 190, id="longer with every fault"),
    ],
)
def test_exclusion(faults: list[int], at_s: int, until_s: int | None) -> None:
    known = [fault("n1", seconds) for seconds in faults] + [fault("n2", 0)]
    found = excluded(NOW + at_s * SECOND, known, 3, 100 * SECOND)
    assert found == ({} if until_s is None else {"n1": NOW + until_s * SECOND})


def test_failures_rest_twice_as_long_each_time() -> None:
    def rest(many: int) -> int:
        failed = [NOW + number for number in range(many)]
        return rest_until_us(failed, first_us=10, longest_us=70) - max(failed, default=0)

    assert [rest(many) for many in (0, 1, 2, 3, 4, 99)] == [0, 10, 20, 40, 70, 70]


def test_a_hold_from_before_some_wpgs_were_configured_is_replaced_once_and_stays_until_then() -> (
    None
):
    old = up(outdated=True, whole=False, ready=False)
    (submit,) = decide(NOW, [old], NOBODY, RULES)
    assert submit == Submit(replaces="h1", reason="")
    assert "before the settings had" in submit.reason
    assert decide(NOW, [old, pending(replaces="h1")], NOBODY, RULES) == ()
    (drain,) = decide(NOW, [old, up("h2", replaces="h1")], NOBODY, RULES)
    assert drain == Drain(hold="h1", reason="")
