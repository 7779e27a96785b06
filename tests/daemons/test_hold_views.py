"""What is told of a hold."""

from typing import Any

from plexrl_slurm.core.ids import SlurmId, WpgId
from plexrl_slurm.daemons.held_wpgs import LiveHold
from plexrl_slurm.daemons.hold_views import view_of


def test_a_hold_without_all_wpgs_of_the_settings_says_so_and_how_they_come() -> None:
    some: Any = object()
    hold = LiveHold(id="h1", slurm_id=SlurmId("1"), submitted_us=1, running_us=2)
    hold.wpgs = {WpgId("train-0"): some, WpgId("rollout-0"): some}
    assert view_of(hold, "local", 6)["trouble"] == (
        "hold h1 has 2 of the 6 WPGs in the settings: it has lost nodes, or was made when [[wpg]] "
        "was another; the next hold has all of them, and `plexrl partition down` and `up` begin "
        "one now"
    )
    assert view_of(hold, "local", 2)["trouble"] == ""


def test_a_hold_that_waits_in_slurm_lacks_nothing_yet() -> None:
    hold = LiveHold(id="h1", slurm_id=SlurmId("1"), submitted_us=1)
    view = view_of(hold, "slurm", 6)
    assert (view["state"], view["trouble"]) == ("pending", "")
