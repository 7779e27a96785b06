"""Stories of images: written line by line, bounded, each partition's own."""

from sqlalchemy.orm import Session

from plexrl_slurm.db.image_moves import ImageMove, add_move, read_moves


def move(deployment: str, at_us: int) -> ImageMove:
    return ImageMove(deployment=deployment, at_us=at_us, place="n1", text=f"host (seq {at_us})")


def test_of_each_deployment_the_newest_lines_stay(session: Session) -> None:
    for at_us in range(6):
        add_move(session, "p", move("a", at_us), keep=3)
        if at_us < 2:
            add_move(session, "p", move("b", at_us), keep=3)
    found = read_moves(session, "p", keep=100)
    assert [each.at_us for each in found if each.deployment == "a"] == [3, 4, 5]
    assert [each for each in found if each.deployment == "b"] == [move("b", 0), move("b", 1)]


def test_of_a_partition_the_newest_lines_stay_and_no_other_is_touched(session: Session) -> None:
    for at_us in range(5):
        add_move(session, "p", move(f"d{at_us}", at_us), keep=3)
        add_move(session, "q", move("a", at_us), keep=9)
    assert [each.at_us for each in read_moves(session, "p", keep=2)] == [3, 4]
    assert len(read_moves(session, "p", keep=100)) == 2
    assert len(read_moves(session, "q", keep=100)) == 5
