"""What a daemon and its agents say to each other (ZeroMQ, CURVE; msgpack).

The agent dials. It says hello with all it has; the daemon welcomes it with what it should run.
Reports are numbered and kept until they are acknowledged; a hello carries the ended runs among
them, so a report that the daemon lost by dying reaches its successor. Orders carry the daemon's
epoch: an older daemon's orders are ignored.
"""

from typing import Any, TypeAlias

import msgspec


class WpgConfig(msgspec.Struct, frozen=True):
    """A WPG that the agent has to run."""

    name: str
    engine: str
    world: int
    gpus: int
    options: dict[str, Any]
    cores: list[int]
    #: Which of the node's GPUs, counted from 0 in the order of its CUDA_VISIBLE_DEVICES.
    devices: list[int] = []


class ImageHeld(msgspec.Struct, frozen=True):
    """A complete image of a training deployment in the agent's host tier."""

    wpg: str
    deployment: str
    progress: tuple[int, int]
    bytes: int


class WpgHeld(msgspec.Struct, frozen=True):
    """State of a WPG as its agent knows it."""

    name: str
    #: ``starting``, ``up`` or ``down``.
    state: str
    resident: str
    #: What has taken effect on the resident training deployment; see ``core.messages.WpgUp``.
    progress: tuple[int, int]
    #: ``(call, part)`` begun and not ended.
    running: list[tuple[str, int]]
    #: How often the gang was started.
    incarnation: int
    pids: list[int]


# ---- agent to daemon ----------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First word of an agent, and its answer to :class:`WhoAreYou`."""

    agent: str
    hold: str
    node: str
    #: Changes with every start of the agent's process.
    epoch: int
    pid: int
    wpgs: list[WpgHeld]
    images: list[ImageHeld]
    #: Snapshot ids in its folder of snapshots.
    snapshots: list[str]
    #: Runs that ended and were never acknowledged, oldest first.
    finished: list["Done"]
    #: GPUs that Slurm gave it, as CUDA_VISIBLE_DEVICES has them; ``None``: not set.
    gpus: list[str] | None = None
    #: Component of the hold that the node belongs to; a node may be in two of them.
    component: int = 0
    #: How often Slurm had requeued the hold when the agent was started.
    restarts: int = 0


class ImageFault(msgspec.Struct, frozen=True):
    """A copy on a disk of the node that does not match its checksums."""

    wpg: str
    deployment: str
    progress: tuple[int, int]
    reason: str
    #: It was deleted, because the image is complete elsewhere.
    dropped: bool


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The agent lives."""

    agent: str
    epoch: int
    #: Damage that it has found and that no newer image has replaced.
    faults: list[ImageFault] = []


class WpgChanged(msgspec.Struct, frozen=True, tag="wpg"):
    """A gang came up or went down."""

    number: int
    name: str
    state: str
    reason: str
    incarnation: int
    pids: list[int]
    at_us: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """An order ended."""

    number: int
    wpg: str
    order: str
    #: ``run``, ``switch``, ``save`` or ``persist``.
    what: str
    ok: bool
    #: Of a persist: the deployment, and the progress that is durable now.
    deployment: str = ""
    progress: tuple[int, int] = (0, 0)
    call: str = ""
    part: int = 0
    #: Encoded ``wire.Result`` of a run.
    result: bytes = b""
    error: str = ""
    moved_bytes: int = 0
    started_us: int = 0
    ended_us: int = 0


Report: TypeAlias = Hello | Beat | WpgChanged | Done

# ---- daemon to agent ----------------------------------------------------------------------


class WhoAreYou(msgspec.Struct, frozen=True, tag="who"):
    """The daemon does not know the sender, which should say hello."""

    epoch: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What to run. WPGs that run already are left alone."""

    epoch: int
    wpgs: list[WpgConfig]
    #: Catalogue entries as dicts of ``ModelSpec`` fields.
    models: dict[str, dict[str, Any]]
    #: Deployments and snapshots that still exist; everything else in the host tier is garbage.
    deployments: list[str]
    snapshots: list[str]


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The report is durable."""

    number: int


class SwitchOrder(msgspec.Struct, frozen=True, tag="switch"):
    """See ``core.messages.Switch``. ``snapshot_path``/``model`` for a rollout WPG."""

    epoch: int
    id: str
    wpg: str
    #: Start of the gang that is meant; an order for an earlier one is ignored.
    incarnation: int
    incoming: str
    outgoing: str = ""
    progress: tuple[int, int] = (0, 0)
    snapshot_path: str = ""
    model: str = ""
    #: Folder of the incoming's durable image, for an agent that has no image as new as this.
    durable_path: str = ""
    durable_progress: tuple[int, int] = (0, 0)


class SaveOrder(msgspec.Struct, frozen=True, tag="save"):
    """See ``core.messages.SaveImage``."""

    epoch: int
    id: str
    wpg: str
    #: Start of the gang that is meant; an order for an earlier one is ignored.
    incarnation: int
    deployment: str
    progress: tuple[int, int]


class PersistOrder(msgspec.Struct, frozen=True, tag="persist"):
    """See ``core.messages.Persist``."""

    epoch: int
    id: str
    wpg: str
    deployment: str
    #: The durable tier.
    folder: str
    #: Progress of the newest durable image that is written down; older ones may go.
    known: tuple[int, int] | None = None


class ExpectOrder(msgspec.Struct, frozen=True, tag="expect"):
    """See ``core.messages.Expect``; ``deployment`` "": nobody."""

    epoch: int
    wpg: str
    deployment: str


class RunOrder(msgspec.Struct, frozen=True, tag="run"):
    """See ``core.messages.Run``."""

    epoch: int
    id: str
    wpg: str
    #: Start of the gang that is meant; an order for an earlier one is ignored.
    incarnation: int
    call: str
    part: int
    deployment: str
    #: The call's place in its deployment's program.
    seq: int
    parts: int
    body: bytes
    #: Snapshot id of a publish; the agent chooses the file.
    publish: str = ""


class AbortOrder(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody waits for this sample call any more."""

    epoch: int
    wpg: str
    call: str


class DropOrder(msgspec.Struct, frozen=True, tag="drop"):
    """Delete images and snapshot files."""

    epoch: int
    deployments: list[str]
    snapshots: list[str]


class StopOrder(msgspec.Struct, frozen=True, tag="stop"):
    """The hold is given back: end the ranks, delete the host tier, exit 0."""

    epoch: int
    #: Another hold's agents use the same host tier: leave it alone.
    keep_host: bool = False


Command: TypeAlias = (
    WhoAreYou
    | Welcome
    | Ack
    | SwitchOrder
    | SaveOrder
    | PersistOrder
    | ExpectOrder
    | RunOrder
    | AbortOrder
    | DropOrder
    | StopOrder
)

_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)
_commands = msgspec.msgpack.Decoder(Command)


def encode(value: Report | Command) -> bytes:
    """Bytes of a report or a command."""
    return _encoder.encode(value)


def decode_report(data: bytes) -> Report:
    """Raises ``msgspec.DecodeError`` on foreign bytes."""
    return _reports.decode(data)


def decode_command(data: bytes) -> Command:
    """Raises ``msgspec.DecodeError`` on foreign bytes."""
    return _commands.decode(data)
