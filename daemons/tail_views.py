"""Whose last samples run on beside another job's, for ``plexrl squeue``."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from plexrl_slurm.core.explain import Asker, WpgView
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Activity

#: As squeue has it, for either of the two.
TAIL: Final = "Tail"
BESIDE: Final = "BesideTail"


def tail_views(views: Iterable[WpgView], asker: Asker) -> Mapping[JobId, list[dict[str, Any]]]:
    """For each job that is a tail somewhere, or runs beside one, what to say of it."""
    found: defaultdict[JobId, list[dict[str, Any]]] = defaultdict(list)
    for view in views:
        if view.beside is None or not view.beside_jobs:
            continue
        tail = view.beside_jobs
        busy = view.jobs if view.activity is Activity.BUSY else ()
        others = [job for job in busy if job not in tail]
        whom = f" beside {asker.jobs(others)}" if others else ""
        for job in tail:
            sentence = f"its last samples run on {view.wpg}{whom}"
            found[job].append(_view(view, TAIL, sentence, others, asker))
        for job in others:
            sentence = f"it runs beside a tail of {asker.jobs(tail)} on {view.wpg}"
            found[job].append(_view(view, BESIDE, sentence, tail, asker))
    return found


def _view(
    view: WpgView, word: str, sentence: str, jobs: Sequence[JobId], asker: Asker
) -> dict[str, Any]:
    return {
        "wpg": view.wpg,
        "word": word,
        "sentence": sentence,
        # Of the others there: what their users call them, and their rows.
        "slurm_ids": [asker.name(job) for job in jobs],
        "jobs": list(jobs),
    }
