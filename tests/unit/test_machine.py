"""Which profile fits a machine, and that facts are read, never invented."""

import msgspec
import pytest

from lanekit import machine, spec

PROFILES = [spec.profile(name) for name in spec.profile_names()]


def gpus(count: int, name: str = "NVIDIA H200") -> tuple[machine.Gpu, ...]:
    return tuple(machine.Gpu(name, 143771, "580.159.03") for _ in range(count))


def nics(count: int) -> tuple[str, ...]:
    return tuple(f"rdmap{i}s0" for i in range(count))


@pytest.mark.parametrize(
    ("found", "efa", "expected", "why"),
    [
        ((), (), "cpu", "no NVIDIA GPU and no EFA NIC here"),
        (gpus(1), (), "h200x1", "1x NVIDIA H200"),
        (gpus(2), (), "h200x2", "2x NVIDIA H200"),
        (gpus(4), (), "h200x2", "no EFA fleet of a known profile"),
        (gpus(8), nics(16), "p5en-x2", "16 EFA NICs"),
        (gpus(8, "NVIDIA H100 80GB HBM3"), nics(32), "p5-x2", "32 EFA NICs"),
        (gpus(8), nics(15), "h200x2", "no EFA fleet"),
        (gpus(1, "NVIDIA L4"), (), "cpu", "no file in lanes/profiles fits these GPUs"),
    ],
)
def test_the_best_profile_and_why(
    bare: machine.Machine,
    found: tuple[machine.Gpu, ...],
    efa: tuple[str, ...],
    expected: str,
    why: str,
) -> None:
    here = msgspec.structs.replace(bare, gpus=found, nics=efa)
    name, reason = machine.choose(here, PROFILES)
    assert name == expected
    assert why in reason


def test_gpus_as_nvidia_smi_prints_them() -> None:
    text = "NVIDIA H200, 143771, 580.159.03\nNVIDIA H200, 143771, 580.159.03\n"
    assert machine.parse_gpus(text) == gpus(2)
    assert machine.parse_gpus("") == machine.parse_gpus("No devices were found") == ()


@pytest.mark.parametrize("text", ["Failed to initialize NVML", "NVIDIA H200, 143771", "a\nb"])
def test_what_is_no_list_of_gpus_is_not_read_as_none(text: str) -> None:
    with pytest.raises(ValueError, match=text.splitlines()[0]):
        machine.parse_gpus(text)


def test_only_amazon_devices_are_efa() -> None:
    text = "rdmap1s0 0x1d0f 4: ACTIVE\nmlx5_0 0x15b3 4: ACTIVE\nbare - \n"
    assert [nic.name for nic in machine.efa(machine.parse_nics(text))] == ["rdmap1s0"]
    assert machine.parse_nics("") == ()


def test_this_machine_can_be_read() -> None:
    here = machine.read()
    assert here.cpus >= 1
    assert here.memory_mib > 0
