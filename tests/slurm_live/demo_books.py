"""Slurm's last word on the demo's holds: their records are complete only when the daemon is gone.

The partition's next daemon would fetch them; the demo has none.
"""

from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.daemons.usage import whose
from plexrl_slurm.db import usage
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.slurm.commands import CommandsSlurm
from plexrl_slurm.slurm.port import PastJob
from tests.slurm_live.cluster import wait_for
from tests.slurm_live.demo_site import DemoPartition


def close(partition: DemoPartition) -> None:
    """Copy what ``sacct`` says as soon as it says that everything has ended."""
    port = CommandsSlurm(partition.cluster.slurm_conf)
    engine = open_database(partition.site.database_url)
    try:
        with transaction(engine) as session:
            holds = usage.incomplete(session, partition.site.partition, since_us=0)
        found: dict[str, list[PastJob]] = {}

        def told() -> bool:
            records = port.past([_leader(hold) for hold in holds])
            found.update(whose(holds, records))
            return all(
                len({record.id for record in found.get(hold.id, ())}) == 2
                and all(record.end_us is not None for record in found[hold.id])
                for hold in holds
            )

        wait_for(told, lambda: f"accounting of all holds: {found}", seconds=30)
        with transaction(engine) as session:
            for hold, records in found.items():
                for record in records:
                    _record(session, hold, record)
    finally:
        engine.dispose()


def _leader(hold: usage.Incomplete) -> Any:
    return str(hold.leader)


def _record(session: Any, hold: str, record: PastJob) -> None:
    usage.record_usage(
        session,
        hold,
        slurm_id=record.id,
        start_us=record.start_us,
        end_us=record.end_us,
        elapsed_us=record.elapsed_us,
        gpus=record.gpus,
        word=record.word,
        now_us=now_us(),
    )
