"""WPGs that share GPUs, event by event: turns, what they cost, and what is told."""

from plexrl_slurm.core.explain import Asker
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import (
    Activity,
    AnyInstruction,
    Call,
    FunctionKind,
    Grant,
    Granted,
    WpgUp,
)
from tests.core.hand import CAUSE, Hand, short
from tests.core.shared import ROLLOUT
from tests.core.workloads import TRAIN, call, sampled, trained

A, S = trained(1), sampled(2, "snapshot")
CREATE, FB = FunctionKind.CREATE, FunctionKind.FORWARD_BACKWARD
STEP, SAMPLE = FunctionKind.OPTIM_STEP, FunctionKind.SAMPLE


class Pair(Hand):
    """Both WPGs, up and asleep."""

    def __init__(self) -> None:
        super().__init__(TRAIN)
        self.at(ROLLOUT).held()
        self.up()
        self.at(TRAIN).up()
        self.place(A, S)

    def granted(
        self, grant: AnyInstruction, *, ok: bool = True, awake: str = "", error: str = ""
    ) -> list[AnyInstruction]:
        assert isinstance(grant, Grant)
        event = Granted(
            wpg=grant.wpg, number=grant.number, ok=ok, awake=WpgId(awake or grant.wpg),
            error=error, at_us=self.now, cause=CAUSE,
        )  # fmt: skip
        return self._then(self.core.handle(event))

    def sentences(self, subject: str) -> str:
        return self.core.explain(WpgId(subject)).sentence

    def awake(self) -> list[str]:
        return [view.wpg for view in self.core.views() if not view.asleep]

    def trains(self, *calls: Call) -> list[AnyInstruction]:
        """The training WPG gets its turn, makes the deployment and runs ``calls``."""
        (grant,) = self.arrive(call(A, CREATE, 0))
        self.granted(grant)
        out = self.later(0.1).end(call(A, CREATE, 0))
        for each in calls:
            self.arrive(each)
            out = self.later(0.1).end(each)
        return out


def sample(seq: int) -> Call:
    return call(S, SAMPLE, seq, tokens=1)


def test_whoever_has_work_is_granted_the_gpus_that_nobody_has() -> None:
    hand = Pair()
    assert hand.awake() == []
    (grant,) = hand.arrive(call(A, CREATE, 0))
    assert isinstance(grant, Grant) and grant.wpg == TRAIN.id
    assert "train-0 is getting the GPUs that train-0 and rollout-0 share" in (
        hand.sentences("rollout-0")
    )
    assert hand.later(0.5).arrive(sample(0)) == [], "nothing runs until the grant has ended"
    assert short(hand.granted(grant)) == ["run model-1/0"]
    assert hand.awake() == ["train-0"]


def test_a_state_in_no_image_is_saved_before_its_wpg_sleeps() -> None:
    hand = Pair()
    hand.trains(call(A, FB, 1), call(A, STEP, 2))
    assert short(hand.later(10).arrive(sample(0))) == ["save model-1 at (3, 0)"]
    forget, grant = hand.later(0.5).switched()
    assert short([forget]) == ["forget model-1 below (3, 0)"]
    assert short(hand.later(0.5).granted(grant)) == ["switch nothing -> snapshot"]
    assert short(hand.at(ROLLOUT).switched()) == ["run snapshot/0"]
    assert hand.awake() == ["rollout-0"]


def test_the_turn_is_paid_by_whom_it_is_for_and_the_gpus_are_booked_once() -> None:
    hand = Pair()
    start_us = hand.now
    hand.trains(call(A, FB, 1), call(A, STEP, 2))
    hand.later(10).arrive(sample(0))
    _, grant = hand.later(0.5).switched()
    hand.later(0.5).granted(grant)
    hand.later(0.25).at(ROLLOUT).switched()
    hand.later(1).end(sample(0))
    hand.later(1).at(TRAIN).release()
    rows = [charge for charge in hand.charges if charge.stop_us > start_us]
    assert {charge.wpg for charge in rows} == {TRAIN.id}
    assert sum(charge.gpu_us for charge in rows) == (hand.now - start_us) * TRAIN.gpus
    switched = [c for c in rows if c.activity is Activity.SWITCH and c.job == 2]
    assert sum(charge.stop_us - charge.start_us for charge in switched) == 1_250_000
    (sampling,) = [c for c in rows if c.activity is Activity.BUSY and c.job == 2]
    assert (sampling.call, sampling.gpu_us) == (sample(0).id, 1_000_000 * TRAIN.gpus)


def test_a_phase_is_not_left_for_the_moment_between_two_of_its_calls() -> None:
    hand = Pair()
    hand.trains(call(A, FB, 1))
    assert hand.later(0.01).arrive(sample(0)) == []
    assert "train-0 is kept for job 1" in hand.sentences("rollout-0")
    assert short(hand.later(0.05).arrive(call(A, FB, 2))) == ["run model-1/2"]


def test_memory_that_is_not_free_leaves_the_turn_and_is_tried_again() -> None:
    hand = Pair()
    hand.trains(call(A, FB, 1), call(A, STEP, 2))
    hand.later(10).arrive(sample(0))
    _, grant = hand.later(0.5).switched()
    assert hand.granted(grant, ok=False, awake="train-0", error="40 MiB are in use") == []
    assert hand.awake() == ["train-0"]
    said = "rollout-0 could not have the GPUs that train-0 and rollout-0 share (40 MiB are in use)"
    assert said in hand.sentences("rollout-0")
    asker = Asker(hand.now + 3_000_000)
    told = hand.core.explain(ROLLOUT.id, asker).sentence
    assert told == f"{said}; it is tried again in 2.0 s"
    # The other goes on meanwhile, from its image.
    assert short(hand.later(1).arrive(call(A, FB, 3))) == ["switch nothing -> model-1"]
    hand.switched()
    hand.later(1).end(call(A, FB, 3))
    out = hand.later(6).tick()
    assert short(out) == ["save model-1 at (4, 0)"], "its turn is tried again"


def test_a_wpg_that_dies_whenever_it_is_woken_waits_longer_each_time_and_says_so() -> None:
    hand = Pair()
    (grant,) = hand.arrive(sample(0))
    for times, seconds in enumerate((5, 10, 20, 40, 80, 160, 320, 320), 1):
        assert isinstance(grant, Grant) and grant.wpg == ROLLOUT.id
        assert hand.at(ROLLOUT).down("rank 0 ended with exit code 1") == []
        assert hand.later(0.1).up() == []
        assert hand.granted(grant, ok=False, error="of no interest now") == []
        often = f", {times} times in a row" if times > 1 else ""
        assert (
            f"its ranks died while they were woken{often}: rank 0 ended with exit code 1"
            in hand.sentences("rollout-0")
        )
        assert hand.later(seconds - 0.3).tick() == []
        (grant,) = hand.later(0.3).tick()
    assert short(hand.later(0.1).granted(grant)) == ["switch nothing -> snapshot"]
    # It was awake: what was is forgotten.
    assert hand.at(ROLLOUT).down() == []
    (grant,) = hand.up()
    assert hand.down() == []
    assert hand.up() == []
    assert "times in a row" not in hand.sentences("rollout-0")
    assert len(hand.later(5.1).tick()) == 1


def test_the_other_wpg_works_while_one_dies_whenever_it_is_woken() -> None:
    hand = Pair()
    hand.arrive(sample(0))
    hand.at(ROLLOUT).down()
    hand.up()
    (grant,) = hand.at(TRAIN).later(1).arrive(call(A, CREATE, 0))
    assert isinstance(grant, Grant) and grant.wpg == TRAIN.id
    assert short(hand.granted(grant)) == ["run model-1/0"]


def test_a_grant_that_was_lost_with_a_gang_is_given_anew_and_its_end_ignored() -> None:
    hand = Pair()
    (first,) = hand.arrive(sample(0))
    (second,) = hand.at(TRAIN).later(0.1).down()
    assert isinstance(first, Grant) and isinstance(second, Grant)
    assert (second.wpg, second.number) == (ROLLOUT.id, first.number + 1)
    assert hand.later(0.1).granted(first) == []
    assert short(hand.later(0.1).granted(second)) == ["switch nothing -> snapshot"]


def test_the_loss_of_the_one_that_sleeps_disturbs_nobody() -> None:
    hand = Pair()
    hand.trains(call(A, FB, 1))
    hand.arrive(call(A, FB, 2))
    assert hand.at(ROLLOUT).later(0.1).down() == []
    assert hand.later(0.1).up() == []
    assert hand.awake() == ["train-0"]


def test_the_one_that_is_lost_awake_comes_back_asleep_and_is_granted_again() -> None:
    hand = Pair()
    hand.trains(call(A, FB, 1))
    hand.arrive(call(A, FB, 2))
    assert hand.later(0.1).down() == []
    (grant,) = hand.later(1).up()
    assert isinstance(grant, Grant)
    assert short(hand.later(0.1).granted(grant)) == ["replay model-1/0"]


def test_a_new_daemon_hears_who_is_awake() -> None:
    hand = Pair()
    hand.trains(call(A, FB, 1), call(A, STEP, 2))
    core = hand.core = hand.make_core()
    for wpg in (ROLLOUT, TRAIN):
        hand.at(wpg).held()
    hand.place(A, applied=(3, 0))
    hand.at(ROLLOUT).up()
    event = WpgUp(
        wpg=TRAIN.id, resident=A.id, progress=(3, 0), awake=True, at_us=hand.now, cause=CAUSE
    )
    core.handle(event)
    core.plan(hand.now, CAUSE)
    core.check_invariants()
    assert hand.awake() == ["train-0"]
    assert core.explain(A.id).sentence == "train-0 has no call of it to run"


def test_a_wpg_that_is_given_back_lets_the_other_have_the_gpus() -> None:
    hand = Pair()
    hand.trains(call(A, FB, 1), call(A, STEP, 2))
    hand.arrive(call(A, FB, 3))
    assert hand.drain() == []
    assert hand.at(ROLLOUT).arrive(sample(0)) == []
    out = hand.at(TRAIN).later(0.5).end(call(A, FB, 3))
    assert short(out) == ["finish model-1/3", "save model-1 at (4, 0)"]
    out = hand.later(0.5).switched()
    assert [type(order).__name__ for order in out] == ["Forget", "Grant", "Drained"]


def test_gpus_are_not_kept_for_a_job_that_waits_for_them_itself() -> None:
    hand = Pair()
    mine, gap_s = sampled(1, "mine"), 0.01
    hand.at(ROLLOUT).place(mine)
    first, second = call(mine, SAMPLE, 0, tokens=1), call(mine, SAMPLE, 1, tokens=1)
    (grant,) = hand.arrive(first)
    hand.granted(grant)
    hand.later(0.1).switched()
    hand.later(0.1).end(first)
    hand.later(gap_s).arrive(second)  # its samples follow one another at once
    hand.later(0.1).end(second)
    (turn,) = hand.later(gap_s).at(TRAIN).arrive(call(A, CREATE, 0))
    assert isinstance(turn, Grant)
    assert turn.wpg == TRAIN.id
