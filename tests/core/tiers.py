"""Two deployments, two snapshots and WPGs whose nodes can be lost, for tests by hand."""

from plexrl_slurm.core.messages import Call, FunctionKind
from tests.core.hand import Hand
from tests.core.workloads import TRAIN, TRAIN_1, call, sampled, trained

CREATE, FB, OPTIM = FunctionKind.CREATE, FunctionKind.FORWARD_BACKWARD, FunctionKind.OPTIM_STEP
SAMPLE = FunctionKind.SAMPLE
A, B = trained(1, "a"), trained(2, "b")
S, T = sampled(1, "s"), sampled(2, "t")


def calls_of(model: str, *kinds: FunctionKind, first: int = 0) -> list[Call]:
    deployment = {"a": A, "b": B}[model]
    return [call(deployment, kind, seq) for seq, kind in enumerate(kinds, first)]


def samples(snapshot: str, *seqs: int) -> list[Call]:
    return [call({"s": S, "t": T}[snapshot], SAMPLE, seq, tokens=1) for seq in seqs]


def durable(every: int = 2, *, image_every: int = 1) -> Hand:
    """Two deployments on a WPG whose node can be lost."""
    hand = Hand(TRAIN, image_every=image_every, durable_every=every)
    hand.place(A, B)
    hand.up()
    return hand


def stepped(hand: Hand, *, steps: int = 1) -> Hand:
    """Deployment a after create and so many steps, each in a host image, the first durable."""
    hand.work(*calls_of("a", CREATE))
    for step in range(steps):
        hand.work(*calls_of("a", FB, OPTIM, first=2 * step + 1))
        hand.switched()
        if step == 0:
            hand.persisted(A, (3, 0))
    return hand


def lost(hand: Hand, image: tuple[int, int] | None, *, model: str = "a") -> Hand:
    """The node is gone with its host images; the deployment lives on train-1 from now on."""
    hand.down("node n1 was lost", blame=False)
    hand.release("node n1 was lost")
    hand.move({"a": A, "b": B}[model], TRAIN_1, image=image)
    hand.at(TRAIN_1).held()
    return hand
