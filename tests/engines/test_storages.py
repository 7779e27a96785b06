"""Memory that tensors give back and take again."""

import pytest
import torch

from plexrl_slurm.engines.storages import Released, bytes_of

pytestmark = pytest.mark.engines


def test_views_of_one_storage_are_counted_once_and_survive() -> None:
    flat = torch.arange(12, dtype=torch.float32)
    view, other = flat[4:8].view(2, 2), torch.ones(3, dtype=torch.bfloat16)
    assert bytes_of([flat, view, other, torch.empty(0)]) == 12 * 4 + 3 * 2
    released = Released([flat, view, other])
    assert (released.bytes, bytes_of([flat, view, other])) == (54, 0)
    released.take()
    assert flat.tolist() == [0.0] * 12
    flat[5] = 7
    assert view.tolist() == [[0.0, 7.0], [0.0, 0.0]]
    released.take()  # there is nothing more to take
    assert flat[5] == 7
