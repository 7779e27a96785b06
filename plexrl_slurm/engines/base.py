"""What a rank needs of an engine, and how one is found by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, cast

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.device_memory import DeviceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Everything one rank process is told at its start (as JSON)."""

    wpg: str
    #: ``deepspeed``, ``vllm`` or ``fake``.
    engine: str
    rank: int
    #: Ranks of the gang. A vLLM WPG has one rank process whatever its tensor parallel size.
    world: int
    #: GPUs of the WPG; on a CPU-only machine, what counts as so many.
    gpus: int
    #: Where the gang's ``torch.distributed`` store listens.
    master_port: int
    #: Where the agent listens for its ranks.
    agent: str
    #: Catalogue of the partition, by name.
    models: Mapping[str, ModelSpec]
    #: Engine options of the WPG from the TOML file (``zero_stage``, ``kv_cache_bytes``, …).
    options: Mapping[str, Any]
    #: CPU cores to run on; empty: anywhere.
    cores: tuple[int, ...] = ()
    #: Name under which this process answers its agent: ``wpg/rank/incarnation``.
    identity: str = ""
    #: Process id of the agent.
    parent: int = 0
    #: First rank of the gang on this node.
    first: int = 0
    #: The node on which the store listens.
    master_address: str = "127.0.0.1"
    #: Of this incarnation of a gang on several nodes: ranks of another one have another.
    meeting: str = ""
    #: It shares its GPUs: it comes up without their memory, and takes it when it is woken.
    asleep: bool = False


class TrainEngine(Protocol):
    """Trains many deployments, one resident at a time. One object per rank; called in lockstep.

    Bad input raises :class:`plexrl_slurm.core.errors.BadInput` *before* any state has changed,
    on every rank alike. Anything else that is raised means the gang must be restarted.
    """

    def create(self, deployment: str, body: wire.Create) -> wire.Created:
        """Make ``deployment`` resident with fresh state: base weights, zero moments, step 0.

        Whatever was resident is overwritten. Builds the skeleton of its architecture if needed.
        """

    def save_image(self, path: Path, *, deployment: str, progress: tuple[int, int]) -> int:
        """Copy the resident's whole state, open step included, into the slab at ``path``.

        The slab is this rank's own; it is valid only once this returned (a torn one is refused
        by ``load_image``). Returns the bytes moved. The deployment stays resident.
        Raises ``StorageFull`` if the slab cannot grow.
        """

    def slab_bytes(self, deployment: str) -> int:
        """Of the slab that :meth:`save_image` of the resident would fill now."""

    def load_image(self, path: Path, *, deployment: str) -> int:
        """Make ``deployment`` resident from the slab at ``path``; returns the bytes moved.

        Raises ``BadImage`` for a slab that is torn, another's, or of another layout.
        """

    def swap_images(
        self,
        save: Path,
        load: Path,
        *,
        outgoing: str,
        progress: tuple[int, int],
        incoming: str,
    ) -> int:
        """:meth:`save_image` of the resident ``outgoing``, then :meth:`load_image`, as one move.

        Raises what they raise; the slab at ``save`` need not be complete then.
        """

    def forward_backward(self, body: wire.ForwardBackward) -> wire.TrainOutput:
        """Loss, logprobs and (unless ``forward_only``) accumulated gradients."""

    def optim_step(self, body: wire.OptimStep) -> wire.OptimOutput:
        """One AdamW step; the gradients are zero afterwards."""

    def save_state(self, body: wire.SaveState) -> wire.Saved:
        """Write a checkpoint folder: complete (fsync, rename) or not at all."""

    def load_state(self, body: wire.LoadState) -> wire.Saved:
        """Read a checkpoint folder into the resident deployment; closes an open step."""

    def publish(self, body: wire.Publish, path: Path) -> wire.Saved:
        """Write the sampling weights to ``path`` (host tier), and to ``body.path`` if given."""

    def sleep(self) -> DeviceMemory:
        """Give the device's memory back, and say what is left; nothing is resident afterwards."""

    def wake(self) -> DeviceMemory:
        """Take it again, for ``create`` or ``load_image`` to fill; says what is taken now."""

    def memory(self) -> DeviceMemory:
        """As it is now."""

    def digest(self) -> str:
        """SHA-256 of the resident's parameters, master weights and moments on this rank."""


class SampleEngine(Protocol):
    """Samples one snapshot at a time; many calls at once. Coroutines of one event loop."""

    async def start(self) -> None:
        """Bring the engine up; slow."""

    async def load_snapshot(self, path: Path, *, model: str) -> int:
        """Replace the weights by those at ``path`` (a safetensors file or a model folder).

        No sample is running. Drops the KV and prefix cache. Returns the bytes moved.
        """

    async def sample(self, call: str, body: wire.Sample) -> wire.SampleOutput | wire.Paused:
        """Completions; raises ``BadInput``. Cancelling the coroutine aborts the request.

        With ``body.resume`` it goes on from there: same tokens as if it had never been paused.
        """

    async def pause(self, call: str) -> None:
        """Have :meth:`sample` of ``call`` answer with what it has. Nothing, if it does not run,
        or if its answer is more than tokens (:func:`plexrl_slurm.engines.resume.can_pause`)."""

    async def sleep(self) -> DeviceMemory:
        """Give the device's memory back (weights and KV cache), and say what is left.

        No sample is running, and none may until the next ``load_snapshot``.
        """

    async def wake(self) -> DeviceMemory:
        """Take it again, for ``load_snapshot`` to fill; says what is taken now."""

    async def memory(self) -> DeviceMemory:
        """As it is now."""

    async def broken(self) -> str:
        """Returns only when the engine cannot go on, busy or not: says why."""

    async def close(self) -> None:
        """End the engine's processes."""


#: Strings, so that asking for one engine never imports another.
_WHERE: Final[Mapping[str, str]] = {
    "deepspeed": "plexrl_slurm.engines.deepspeed:DeepSpeedEngine",
    "vllm": "plexrl_slurm.engines.vllm:VllmEngine",
    "fake_train": "plexrl_slurm.engines.fake:FakeTrainEngine",
    "fake_sample": "plexrl_slurm.engines.fake:FakeSampleEngine",
}
#: Engines of the training kind; the others sample.
TRAIN_ENGINES: Final = frozenset({"deepspeed", "fake_train"})


def make_train_engine(spec: RankSpec) -> TrainEngine:
    """Import and build the engine, and only it."""
    return cast(TrainEngine, _find(spec.engine)(spec))


def make_sample_engine(spec: RankSpec) -> SampleEngine:
    """Import and build the engine, and only it."""
    return cast(SampleEngine, _find(spec.engine)(spec))


def _find(engine: str) -> Any:
    module, _, name = _WHERE[engine].partition(":")
    return getattr(import_module(module), name)
