"""The scheduler's whole vocabulary: events in, instructions out.

All are plain values. ``cause`` names what set a chain off (a request, a timer, a lost
node); it is carried into logs and ledger rows but ignored by ``==``, so tests compare
what matters. ``at_us`` is the instant of an event, UTC microseconds; the core has no clock.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import TypeAlias

from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.records import dataclass
from plexrl_slurm.core.subjects import READS as READS
from plexrl_slurm.core.subjects import WRITES as WRITES
from plexrl_slurm.core.subjects import Activity as Activity
from plexrl_slurm.core.subjects import Call as Call
from plexrl_slurm.core.subjects import Deployment as Deployment
from plexrl_slurm.core.subjects import FunctionKind as FunctionKind
from plexrl_slurm.core.subjects import Pool as Pool
from plexrl_slurm.core.subjects import Wpg as Wpg

# ---- events -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of every event and instruction."""

    cause: CauseId = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Message):
    """A fact."""

    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgHeld(Event):
    """A WPG belongs to the partition from now on; DOWN until :class:`WpgUp`."""

    wpg: Wpg


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgUp(Event):
    """The gang is ready. What it says it has, it has (after a daemon's restart it may be much)."""

    wpg: WpgId
    #: Deployment in its device memory, if any.
    resident: DeploymentId | None = None
    #: Progress of the resident's state, if the gang knows it: while calls run again it is less
    #: than what has been answered. ``None``: what :class:`DeploymentPlaced` said was applied.
    progress: tuple[int, int] | None = None
    #: ``(call, part)`` that it is still working on.
    running: tuple[tuple[CallId, int], ...] = ()
    #: Of one that shares GPUs: it is the one that has them. A gang that was started anew sleeps.
    #: What is found of a group after a daemon's restart is said before the core plans.
    awake: bool = False
    #: Of which it runs a tail in its second engine slot, beside ``resident``.
    beside: DeploymentId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgDown(Event):
    """A rank died; the gang is being restarted. Device state is gone, host images are not.

    If its node is lost, :class:`WpgReleased` follows, and a :class:`DeploymentMoved` for each
    deployment that lived there.
    """

    wpg: WpgId
    reason: str
    #: Whether a call that ran may be what killed it; false if a node was lost, say.
    blame: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgReleased(Event):
    """The WPG no longer belongs to the partition; its books are closed.

    Deployments that live there stay, and wait until they are moved or it is held again. A
    :class:`Persist` under way there is over without an answer.
    """

    wpg: WpgId
    #: Why, for whoever waits: "node gpu-7 was lost", "the hold's time is over".
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgDraining(Event):
    """The WPG is to be given back: nothing new begins there, and what it has is made durable.

    Ends in :class:`Drained`, or in :class:`WpgResumed`. Calls may still arrive; they wait.
    """

    wpg: WpgId
    #: It is not given back: what for some jobs leave it. The others go on there.
    relief: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgResumed(Event):
    """The WPG is not given back after all: calls run there again."""

    wpg: WpgId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What a job's rollouts have been like: the newest values, oldest first."""

    #: How long sample calls ran.
    lengths_us: tuple[int, ...] = ()
    #: Pauses between calls, and those of them within a rollout that nobody holds for.
    gaps_us: tuple[int, ...] = ()
    stalls_us: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a job's steps are believed to be like, before any of them has run here."""

    #: Alone.
    step_us: int
    #: Busy time of one phase, in each pool.
    train_us: int
    sample_us: int
    #: Of one part, by kind.
    functions: Mapping[FunctionKind, int] = field(default_factory=dict)
    #: ``None``: nobody knows.
    rollouts: Rollouts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlaced(Event):
    """A deployment got its home."""

    deployment: Deployment
    #: Progress contained in its newest complete host image: calls with
    #: ``(seq, part) < image`` need no replay. ``None``: no image, replay starts with create,
    #: or with ``durable``: a home loads the newer of the two.
    image: tuple[int, int] | None = None
    #: Progress that has taken effect on the device or in the image (after a restart).
    applied: tuple[int, int] = (0, 0)
    #: Progress of its newest durable image (after a restart). All calls from there on are said
    #: again, those that have ended as ``done``. Of a known deployment, ``None`` changes nothing.
    durable: tuple[int, int] | None = None
    #: Progress of the durable image before that one, if it is still there (after a restart).
    spare: tuple[int, int] | None = None
    #: Of its job; ``None``: nobody knows.
    expected: Expected | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentMoved(Event):
    """Its home is ``deployment.wpg`` from now on; that WPG need not be held yet.

    Waiting calls go along. If the old home is up, nothing runs or moves there and its device
    has no change of this deployment that is in no image (it is drained, say); else the core
    raises ``InvalidTransition``, see ``SchedulerCore.why_not_move``. An old home that still
    lives forgets what it has of it, and copies it to the durable tier no more, before the core
    hears of the move.
    """

    deployment: Deployment
    #: What the new home can load: the durable image, as a rule. ``None``: nothing, calls run
    #: again from create. Without meaning for a snapshot.
    image: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentDropped(Event):
    """Its job ended or nobody names the snapshot any more; its waiting calls are cancelled."""

    deployment: DeploymentId


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArrived(Event):
    """A controller asked for a function; durable before the core hears of it."""

    call: Call
    #: After a daemon's restart: this call has ended before, and is known only because no
    #: complete image contains it yet. It runs again only if a rewind needs it.
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCancelled(Event):
    """Nobody waits for it any more. A running one ends as usual."""

    call: CallId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """Answer to :class:`Run`. ``ok`` is false if the function itself failed (bad input, NaN)."""

    wpg: WpgId
    call: CallId
    part: int
    ok: bool
    #: Why it failed, for a state that cannot be rebuilt; may be "".
    error: str = ""
    #: Of a sample that had been paused: tokens computed again, and microseconds that took.
    prefilled: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """A sample call that ran has stopped between two tokens, as a :class:`Pause` asked.

    What it has sampled is kept: its next :class:`Run` goes on there, to the same end.
    """

    wpg: WpgId
    call: CallId
    part: int
    #: Sampled so far.
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesLeft:
    """What a home can load, after newer images turned out to be damaged or gone."""

    #: Progress of the newest; ``None``: there is none, the deployment is made anew by ``create``.
    image: tuple[int, int] | None
    #: Of the newest durable one.
    durable: tuple[int, int] | None


class Room(StrEnum):
    """Whether a tier had room for a switch or a save."""

    ENOUGH = ""
    #: It had none, which was found before any rank began: what was resident still is.
    SHORT = "short"
    #: It had none, and nobody knows what the device holds now.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchEnded(Event):
    """Answer to :class:`Switch` and :class:`SaveImage`."""

    wpg: WpgId
    ok: bool
    #: Bytes that were moved.
    moved_bytes: int = 0
    #: Why it failed, for the user; may be "".
    error: str = ""
    #: Of the incoming; it may not be what was believed. With ``ok`` this image is loaded.
    left: ImagesLeft | None = None
    #: If it failed for want of it, which is no deployment's fault.
    room: Room = Room.ENOUGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(Event):
    """Answer to :class:`Grant`."""

    wpg: WpgId
    number: int
    ok: bool
    #: Who has the GPUs now; "" for nobody. What was resident there is lost in any case.
    awake: WpgId
    #: Why it was refused, for people: memory that is not free, say.
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted(Event):
    """Answer to :class:`Persist`; also ``ok=False`` for one that was lost with its agent."""

    deployment: DeploymentId
    #: Of the image that is durable now: what was asked for, or newer. If it failed: as asked.
    progress: tuple[int, int]
    ok: bool
    #: If it failed because the image to copy is damaged or gone.
    left: ImagesLeft | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableLost(Event):
    """Somebody who looked found a durable image damaged; what there is in memory is as it was."""

    deployment: DeploymentId
    #: Of the newest durable image that is left, and of the one before it.
    durable: tuple[int, int] | None
    spare: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed: the answer to :class:`WakeAt`, or a clock's beat."""

    #: Somebody reads the books now: charge everything up to this instant.
    flush: bool = False


# ---- instructions -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction(Message):
    """Something the shell has to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch(Instruction):
    """Bring ``incoming`` onto the WPG; first save ``outgoing`` if it is given (it is dirty).

    Ends in :class:`SwitchEnded`, or the WPG goes down.
    """

    wpg: WpgId
    outgoing: DeploymentId | None
    #: Progress of ``outgoing``, to be written into its image.
    outgoing_progress: tuple[int, int]
    incoming: DeploymentId
    #: Whose last samples run on meanwhile, and after it, in another engine slot of the WPG.
    beside: DeploymentId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveImage(Instruction):
    """Write the resident's image to the host tier, and go on. Ends in :class:`SwitchEnded`."""

    wpg: WpgId
    deployment: DeploymentId
    progress: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant(Instruction):
    """Wake ``wpg`` on the GPUs that it shares, after whoever has them sleeps.

    Nothing runs on either, and nothing on the device is needed. Ends in :class:`Granted`, or one
    of the two goes down: then it counts as never given.
    """

    wpg: WpgId
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Instruction):
    """Run one part of a call. Ends in :class:`RunEnded`, or the WPG goes down."""

    wpg: WpgId
    call: CallId
    deployment: DeploymentId
    part: int
    #: How often this part was begun; > 1 after the loss of a rank.
    attempt: int
    #: It was answered before; only its effect on the state is wanted.
    replay: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Instruction):
    """Stop running sample calls between two tokens, because others wait.

    Each ends in :class:`Paused`, or in :class:`RunEnded` if it ended first or cannot be split.
    """

    wpg: WpgId
    calls: tuple[CallId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Instruction):
    """All parts of a call have ended; the caller may have its answer."""

    call: CallId
    ok: bool
    #: Why it failed, when the core itself knows ("ranks died 3 times under it"); else "".
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(Instruction):
    """No loss can make calls of ``deployment`` below ``progress`` run again; drop their bodies.

    They are in a complete image; where nodes can be lost, in a durable one.
    """

    deployment: DeploymentId
    progress: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist(Instruction):
    """Copy the newest complete host image of ``deployment`` to the durable tier.

    In the background: it occupies nothing on the WPG, and calls, switches and saves go on. It
    never replaces a newer durable image. At most one a deployment is under way. Ends in
    :class:`Persisted`, or the WPG is released.
    """

    deployment: DeploymentId
    #: Its home, whose agent has the image.
    wpg: WpgId
    #: Of the newest host image that the core knows of.
    progress: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect(Instruction):
    """A hint, said when it changes: ``deployment`` is likely to be switched in next.

    ``None``: nobody is. Its image may be brought nearer meanwhile; nothing has to be done.
    """

    wpg: WpgId
    deployment: DeploymentId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Instruction):
    """Once for a :class:`WpgDraining`: nothing more is under way there, and nothing is lost
    with it. Every deployment of it is durable as it is, was never created, or is broken; or
    the WPG has been released.
    """

    wpg: WpgId


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge(Instruction):
    """A closed stretch of a WPG's time: a ledger row. Stretches of a WPG have no gap or overlap."""

    wpg: WpgId
    activity: Activity
    #: Who pays (busy, switch, kept); ``None`` for idle and down.
    job: JobId | None
    #: What it was for, when it was one thing.
    call: CallId | None
    start_us: int
    stop_us: int
    #: GPU-microseconds; for an unshared stretch ``(stop - start) * gpus``.
    gpu_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt(Instruction):
    """Send a :class:`Tick` at this instant; a later one replaces an earlier one."""

    at_us: int


AnyEvent: TypeAlias = (
    WpgHeld
    | WpgUp
    | WpgDown
    | WpgReleased
    | WpgDraining
    | WpgResumed
    | DeploymentPlaced
    | DeploymentMoved
    | DeploymentDropped
    | CallArrived
    | CallCancelled
    | RunEnded
    | Paused
    | SwitchEnded
    | Granted
    | Persisted
    | DurableLost
    | Tick
)
#: Instructions that occupy a WPG, or free it.
Work: TypeAlias = Switch | SaveImage | Grant | Run | Pause
AnyInstruction: TypeAlias = Work | Finish | Forget | Persist | Expect | Drained | Charge | WakeAt
