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
    #: Nodes that it lies on, each with an equal share of its ranks, and which of them this is.
    nodes: int = 1
    number: int = 0
    #: WPGs with the same name here take turns on the same GPUs; "": it has them for itself.
    group: str = ""
    #: Of these, what must be free before it wakes, and what it may keep while it sleeps.
    awake_bytes: int = 0
    residual_bytes: int = 0

    @property
    def ranks(self) -> range:
        """Of this node."""
        here = self.world // self.nodes
        return range(self.number * here, (self.number + 1) * here)


class ImageHeld(msgspec.Struct, frozen=True):
    """A complete image of a training deployment in the agent's host tier.

    Of a WPG over several nodes: this node's share of one, and there may be two of a deployment.
    """

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
    #: It has the GPUs that it shares.
    awake: bool = False
    #: Of which a tail runs on in its second engine.
    beside: str = ""


class SnapshotSource(msgspec.Struct, frozen=True):
    """An agent with published snapshots, and the ways to them."""

    agent: str
    #: Where it gives them to other agents; port 0: it cannot.
    host: str
    port: int
    #: Where they lie, and the secret that lies there: whoever reads it is on the same node.
    folder: str
    token: str


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
    #: How others get the snapshots above.
    source: SnapshotSource | None = None
    #: Snapshots of other nodes that it has a copy of.
    fetched: list[str] = []


class ImageFault(msgspec.Struct, frozen=True):
    """A copy on a disk of the node that does not match its checksums."""

    wpg: str
    deployment: str
    progress: tuple[int, int]
    reason: str
    #: It was deleted, because the image is complete elsewhere.
    dropped: bool


class StockImage(msgspec.Struct, frozen=True):
    """A complete image in one tier of a node."""

    wpg: str
    deployment: str
    #: ``host`` or ``nvme``.
    tier: str
    progress: tuple[int, int]
    bytes: int
    #: It was switched in or out; 0: not since the agent's start.
    last_use_us: int


class Stock(msgspec.Struct, frozen=True):
    """What the tiers of a node hold."""

    images: list[StockImage]
    #: Bytes of all copies on NVMe, and of those that are being written; its budget, or ``None``.
    nvme_used: int = 0
    nvme_limit: int | None = None
    #: What is wrong with the folders of its tiers, for an admin; "" if nothing is.
    trouble: str = ""
    #: Damaged copies that were found and that no newer image has replaced.
    faults: list[ImageFault] = []


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The agent lives."""

    agent: str
    epoch: int
    #: If it is another than it said last.
    stock: Stock | None = None


class WpgChanged(msgspec.Struct, frozen=True, tag="wpg"):
    """A gang came up or went down."""

    number: int
    name: str
    state: str
    reason: str
    incarnation: int
    pids: list[int]
    at_us: int


class ImagesLeft(msgspec.Struct, frozen=True):
    """See ``core.messages.ImagesLeft``."""

    image: tuple[int, int] | None
    durable: tuple[int, int] | None
    #: What is wrong with newer ones, a sentence each.
    damaged: list[str]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """An order ended."""

    number: int
    wpg: str
    order: str
    #: ``run``, ``switch``, ``save``, ``grant``, ``persist`` or ``evict``; of a part: ``fetch`` and
    #: ``share``, too.
    what: str
    ok: bool
    #: Of a persist: the deployment, and the progress that is durable now. Of a switch: the
    #: incoming deployment.
    deployment: str = ""
    progress: tuple[int, int] = (0, 0)
    call: str = ""
    #: Of a grant: its number.
    part: int = 0
    #: Of a grant: who has the GPUs now; "" for nobody.
    awake: str = ""
    #: Encoded ``wire.Result`` of a run; of a share, encoded ``memory.shares.Share``.
    result: bytes = b""
    error: str = ""
    moved_bytes: int = 0
    started_us: int = 0
    ended_us: int = 0
    #: Of a training switch: what there is of the incoming. Of a persist that has no image to copy.
    left: ImagesLeft | None = None
    #: Of a switch, a save or a fetch that found a tier full: see ``core.messages.Room``.
    room: str = ""


class SnapshotHere(msgspec.Struct, frozen=True, tag="snapshot"):
    """A snapshot is complete in the agent's memory. Not numbered: a hello says it again."""

    agent: str
    epoch: int
    snapshot: str
    bytes: int
    #: Agent that it was fetched from; "": it was published here, and is not safe yet.
    origin: str = ""
    took_us: int = 0


class PartReady(msgspec.Struct, frozen=True, tag="ready"):
    """Answer to :class:`PrepareOrder`: no rank of an earlier incarnation lives here."""

    wpg: str
    incarnation: int
    #: Free on this node a moment ago, for the ranks to find each other.
    port: int
    images: list[ImageHeld]


Report: TypeAlias = Hello | Beat | WpgChanged | Done | PartReady | SnapshotHere

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
    #: Of a snapshot in host memory: who has it, and its size (0: unknown).
    sources: list[SnapshotSource] = []
    snapshot_bytes: int = 0
    #: Of a WPG over several nodes: the image to load, which every node has.
    image: tuple[int, int] | None = None
    #: A durable image and the calls since then can replace the image that the outgoing has.
    replaceable: bool = False
    #: Whose samples run on in the WPG's other engine.
    beside: str = ""


class SaveOrder(msgspec.Struct, frozen=True, tag="save"):
    """See ``core.messages.SaveImage``."""

    epoch: int
    id: str
    wpg: str
    #: Start of the gang that is meant; an order for an earlier one is ignored.
    incarnation: int
    deployment: str
    progress: tuple[int, int]
    #: See :class:`SwitchOrder`.
    replaceable: bool = False


class GrantOrder(msgspec.Struct, frozen=True, tag="grant"):
    """See ``core.messages.Grant``."""

    epoch: int
    id: str
    wpg: str
    number: int


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
    #: Of a WPG over several nodes: the image to copy, and the name of the copy that all its nodes
    #: write into. Each writes its share; with ``shares``, what they said, one makes it whole.
    image: tuple[int, int] | None = None
    share: str = ""
    shares: list[bytes] = []


class EvictOrder(msgspec.Struct, frozen=True, tag="evict"):
    """An image leaves host memory, as another complete copy of it exists or can be made."""

    epoch: int
    id: str
    wpg: str
    deployment: str
    #: ``nvme`` or ``durable``.
    to: str
    #: Progress of its newest durable image, if it is to be left to that.
    durable: tuple[int, int] | None = None


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
    """Nobody waits for this sample call any more; or it is to pause between two tokens."""

    epoch: int
    wpg: str
    call: str
    #: See ``core.messages.Pause``.
    pause: bool = False


class DropOrder(msgspec.Struct, frozen=True, tag="drop"):
    """Delete images and snapshot files."""

    epoch: int
    deployments: list[str]
    snapshots: list[str]


class BringOrder(msgspec.Struct, frozen=True, tag="bring"):
    """Bring a snapshot to this node in the background: one of its WPGs will sample from it."""

    epoch: int
    snapshot: str
    #: 0: unknown.
    bytes: int
    sources: list[SnapshotSource]


class SafeOrder(msgspec.Struct, frozen=True, tag="safe"):
    """Another node has the snapshot too: its publish may end."""

    epoch: int
    snapshot: str


class StopOrder(msgspec.Struct, frozen=True, tag="stop"):
    """The hold is given back: end the ranks, delete the host tier, exit 0."""

    epoch: int
    #: Another hold's agents use the same host tier: leave it alone.
    keep_host: bool = False


# -- to the agents of a WPG that lies on several nodes ------------------------------------------


class PrepareOrder(msgspec.Struct, frozen=True, tag="prepare"):
    """End the ranks of every earlier incarnation. Ends in :class:`PartReady`."""

    epoch: int
    wpg: str
    #: 0: the WPG is no more; its images are garbage, and nothing is to be answered.
    incarnation: int


class StartOrder(msgspec.Struct, frozen=True, tag="start"):
    """Every node is ready: start the ranks of this incarnation."""

    epoch: int
    wpg: str
    incarnation: int
    #: Where rank 0 waits for the others.
    address: str
    port: int
    #: Keeps ranks of another incarnation out; also the writer's name in what they write.
    name: str


class FetchOrder(msgspec.Struct, frozen=True, tag="fetch"):
    """Have this image in the host tier, for the switch that follows."""

    epoch: int
    id: str
    wpg: str
    deployment: str
    image: tuple[int, int]
    #: Folder of the durable image with this progress; "": every node has it.
    durable_path: str = ""


class SettleOrder(msgspec.Struct, frozen=True, tag="settle"):
    """Which image of a deployment every node has (``None``: none); all others of it may go."""

    epoch: int
    wpg: str
    images: dict[str, tuple[int, int] | None]


Command: TypeAlias = (
    WhoAreYou
    | Welcome
    | Ack
    | SwitchOrder
    | SaveOrder
    | GrantOrder
    | PersistOrder
    | ExpectOrder
    | EvictOrder
    | RunOrder
    | AbortOrder
    | DropOrder
    | BringOrder
    | SafeOrder
    | StopOrder
    | PrepareOrder
    | StartOrder
    | FetchOrder
    | SettleOrder
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
