"""What is refused because device memory is not free."""

import pytest

from plexrl_slurm.core.errors import DeviceBusy
from plexrl_slurm.engines.device_memory import DeviceMemory, check_given_back, check_room, together

MIB = 1 << 20


def test_what_an_engine_may_keep_is_a_limit() -> None:
    check_given_back(DeviceMemory(used=10 * MIB), limit=10 * MIB, who="vLLM")
    with pytest.raises(DeviceBusy, match=r"vLLM sleeps and 11 MiB .* 10 MiB allowed"):
        check_given_back(DeviceMemory(used=11 * MIB), limit=10 * MIB, who="vLLM")


def test_nobody_is_given_memory_that_is_not_free() -> None:
    check_room(DeviceMemory(used=5 * MIB, free=3 * MIB), needed=3 * MIB, who="vLLM")
    check_room(DeviceMemory(used=5 * MIB), needed=99 * MIB, who="vLLM")
    with pytest.raises(DeviceBusy, match=r"vLLM needs 4 MiB .* 3 MiB are free"):
        check_room(DeviceMemory(used=5 * MIB, free=3 * MIB), needed=4 * MIB, who="vLLM")


def test_the_fullest_gpu_of_several_says_what_is_free() -> None:
    parts = [DeviceMemory(used=1, free=9), DeviceMemory(used=4, free=6)]
    assert together(parts) == DeviceMemory(used=5, free=12)
    assert together([DeviceMemory(used=1), DeviceMemory(used=2)]) == DeviceMemory(used=3)
    assert together([]) == DeviceMemory(used=0)
