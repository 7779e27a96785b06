"""An agent that is started again may have another image than the core believed in."""

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    AnyInstruction,
    Call,
    CallArrived,
    Deployment,
    DeploymentPlaced,
    Finish,
    Forget,
    FunctionKind,
    Pool,
    Run,
    RunEnded,
    Switch,
    SwitchEnded,
    Wpg,
    WpgDown,
    WpgHeld,
    WpgUp,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore

WPG, NAME, CAUSE = WpgId("train-0"), DeploymentId("m"), CauseId("test")
DEPLOYMENT = Deployment(
    id=NAME, job=JobId(1), pool=Pool.TRAIN, wpg=WPG, image_bytes=1000, content="m"
)
KINDS = [FunctionKind.CREATE, FunctionKind.FORWARD_BACKWARD, FunctionKind.OPTIM_STEP]


def call(seq: int) -> Call:
    return Call(
        id=CallId(f"m.{seq}"), deployment=NAME, job=JobId(1), kind=KINDS[min(seq, 2)], seq=seq
    )


def down_after_three_calls() -> SchedulerCore:
    """Three calls have run, there is no image, and the gang has gone down."""
    core = SchedulerCore(find_policy("hrrs"), costs=SwitchCosts())
    wpg = Wpg(id=WPG, pool=Pool.TRAIN, gpus=1)
    core.handle(WpgHeld(at_us=0, cause=CAUSE, wpg=wpg))
    core.handle(WpgUp(at_us=1, cause=CAUSE, wpg=WPG))
    core.handle(DeploymentPlaced(at_us=2, cause=CAUSE, deployment=DEPLOYMENT))
    for seq in range(3):
        core.handle(CallArrived(at_us=3, cause=CAUSE, call=call(seq)))
    for seq in range(3):
        (run,) = [step for step in core.plan(4, CAUSE) if isinstance(step, Run)]
        assert run.call == call(seq).id
        core.handle(RunEnded(at_us=5, cause=CAUSE, wpg=WPG, call=run.call, part=0, ok=True))
    core.handle(WpgDown(at_us=6, cause=CAUSE, wpg=WPG, reason="killed"))
    return core


def runs(instructions: list[AnyInstruction]) -> list[str]:
    return [step.call for step in instructions if isinstance(step, Run)]


def test_an_image_whose_report_was_lost_saves_the_replay_of_what_it_contains() -> None:
    core = down_after_three_calls()
    out = core.handle(DeploymentPlaced(at_us=7, cause=CAUSE, deployment=DEPLOYMENT, image=(2, 0)))
    assert Forget(deployment=NAME, progress=(2, 0), cause=CAUSE) in out
    core.handle(WpgUp(at_us=8, cause=CAUSE, wpg=WPG))
    core.handle(CallArrived(at_us=9, cause=CAUSE, call=call(3)))
    (switch,) = [step for step in core.plan(10, CAUSE) if isinstance(step, Switch)]
    assert switch.incoming == NAME
    core.handle(SwitchEnded(at_us=11, cause=CAUSE, wpg=WPG, ok=True, moved_bytes=1000))
    # The image has seq 0 and 1; seq 2 runs again before seq 3.
    assert runs(core.plan(12, CAUSE)) == ["m.2"]
    core.check_invariants()


def test_a_deployment_whose_only_image_is_gone_fails_its_calls_with_that_reason() -> None:
    core = down_after_three_calls()
    core.handle(DeploymentPlaced(at_us=7, cause=CAUSE, deployment=DEPLOYMENT, image=(3, 0)))
    core.handle(DeploymentPlaced(at_us=8, cause=CAUSE, deployment=DEPLOYMENT, image=None))
    core.handle(WpgUp(at_us=9, cause=CAUSE, wpg=WPG))
    out = core.handle(CallArrived(at_us=10, cause=CAUSE, call=call(3)))
    (finish,) = [step for step in out if isinstance(step, Finish)]
    assert not finish.ok
    assert "its state is lost" in finish.reason
    core.check_invariants()


def test_the_same_image_changes_nothing() -> None:
    core = down_after_three_calls()
    assert core.handle(DeploymentPlaced(at_us=7, cause=CAUSE, deployment=DEPLOYMENT)) == []
    core.handle(WpgUp(at_us=8, cause=CAUSE, wpg=WPG))
    core.handle(CallArrived(at_us=9, cause=CAUSE, call=call(3)))
    assert runs(core.plan(10, CAUSE)) == ["m.0"]
