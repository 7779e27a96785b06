"""Contradictions that the books of the core must never show. Slow and complete."""

from collections.abc import Iterator

from plexrl_slurm.core import shared
from plexrl_slurm.core.books import Books
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.lane import Lane, Tenant
from plexrl_slurm.core.messages import FunctionKind
from plexrl_slurm.core.ordering import START
from plexrl_slurm.core.residency import Residency

_ON_DEVICE = frozenset(
    {Residency.CREATING, Residency.RESIDENT, Residency.SAVING, Residency.OFFLOADING}
)


def complaints(books: Books) -> list[str]:
    """Every contradiction, as sentences."""
    found: list[str] = []
    for lane in books.lanes.values():
        found += _lane(lane)
        if lane.group is not None and lane.group.leader is lane:
            found += shared.complaints(lane.group)
        for tenant in lane.tenants.values():
            found += _tenant(lane, tenant)
    for name, (lane, tenant) in books.homes.items():
        if name not in tenant.members or lane.tenants.get(tenant.key) is not tenant:
            found.append(f"{name} has lost its home {lane.id}")
        elif tenant.members[name].wpg != lane.id or books.lanes.get(lane.id) is not lane:
            found.append(f"{name} lives on {lane.id} and is said to live elsewhere")
    for call_id, entry in books.entries.items():
        if entry.call.deployment not in books.homes:
            found.append(f"call {call_id} is kept for a deployment that is gone")
    return found


def _lane(lane: Lane) -> Iterator[str]:
    runs = list(lane.running.values())
    kinds = {run.entry.call.kind for run in runs if run.entry is not None}
    if len(runs) > 1 and kinds - {FunctionKind.SAMPLE}:
        yield f"{lane.id} runs {len(runs)} functions at once"
    if lane.move is not None and lane.working():
        yield f"{lane.id} runs a function while it switches"
    if not lane.up and (runs or lane.move is not None or lane.resident is not None):
        yield f"{lane.id} is down and does something"
    if lane.up and lane.wpg is None:
        yield f"{lane.id} is up and not held"
    here = (None, lane.resident, lane.beside)
    if any(run.tenant not in here for run in runs):
        yield f"{lane.id} runs a function of what is not resident"
    if sum(lane.jobs.values()) != sum(run.entry is not None for run in runs):
        yield f"{lane.id} counts its running calls wrongly"
    if lane.meter is not None and lane.meter.cursor_us > lane.now_us:
        yield f"{lane.id} has charged the future"
    if lane.meter is not None and lane.meter.use != lane.use():
        yield f"{lane.id} charges {lane.meter.use} while it does {lane.use()}"
    if lane.beside is not None:
        yield from _beside(lane, lane.beside)
    if lane.kept_until_us is not None and (lane.working() or lane.move is not None):
        yield f"{lane.id} is kept while it works"
    if lane.drained and (runs or lane.move is not None or not lane.draining):
        yield f"{lane.id} was given up and does something"
    if lane.draining and lane.wpg is None:
        yield f"{lane.id} is being given back and not held"
    if lane.draining and (lane.owed is not None or lane.kept_until_us is not None):
        yield f"{lane.id} is being given back and waits for somebody"
    if any(lane.tenants.get(key) is not tenant for key, tenant in lane.copies.items()):
        yield f"{lane.id} is to copy what does not live there"
    for (key, job), phase in lane.phases.items():
        if phase.waiting != _waiting(lane, key, job):
            yield f"{lane.id} counts the waiting calls of job {job} wrongly"
        if phase.waiting < 0 or phase.running < 0:
            yield f"{lane.id} counts the calls of job {phase.job} wrongly"


def _beside(lane: Lane, tenant: Tenant) -> Iterator[str]:
    if not lane.up or lane.wpg is None:
        yield f"{lane.id} has a tail of {tenant.key} and is not there"
    elif not lane.wpg.second_slot or tenant.program is not None or lane.group is not None:
        yield f"{lane.id} has a tail of {tenant.key} and no slot for it"
    if lane.resident is tenant:
        yield f"{tenant.key} is in both slots of {lane.id}"


def _waiting(lane: Lane, key: str, job: JobId) -> int:
    """Calls that wait in one phase."""
    if key:
        return key in lane.tenants and lane.tenants[key].ready_us is not None
    samples = (e for tenant in lane.tenants.values() for e in tenant.samples.values())
    return sum(entry.call.job == job for entry in samples)


def _tenant(lane: Lane, tenant: Tenant) -> Iterator[str]:
    head = tenant.head()
    if (head is not None) != (tenant.key in lane.waiting):
        yield f"{tenant.key} is missing among those that wait on {lane.id}"
    on_device = tenant.where.at in _ON_DEVICE
    if on_device != (tenant in (lane.resident, lane.beside)):
        yield f"{tenant.key} is {tenant.where.at} and resident is not"
    program = tenant.program
    if program is None:
        return
    if not (program.image or START) <= program.position <= program.frontier:
        yield (
            f"{tenant.key}: image {program.image}, position {program.position} and frontier "
            f"{program.frontier} are out of order"
        )
    if tenant.copying and lane.wpg is None:
        yield f"{tenant.key} is being copied from nowhere"
    if program.dirty and not on_device:
        yield f"{tenant.key} has changes that are neither on the device nor in an image"
    for seq, entry in program.calls.items():
        if seq < program.frontier[0] and not entry.answered:
            yield f"{tenant.key}: seq {seq} and the frontier {program.frontier} disagree"
    running = any(run.tenant is tenant for run in lane.running.values())
    waiting = program.head() is not None and not running
    if waiting != (tenant.ready_us is not None):
        yield f"{tenant.key} waits since {tenant.ready_us}, against its program"
