"""Evidence beside the logs, joined when it is there: NIC counters and inventory, images, patches.

Pure. What is absent is "could not check" and noted; what contradicts the run refutes it.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from lanekit import machine
from lanekit.spec import Profile
from lanekit.verdict import Check, Outcome

# Bytes that leave a NIC; EFA keeps them under hw_counters (prometheus/node_exporter#3670).
SENT: Final = ("tx_bytes", "rdma_write_bytes")
WHEN: Final = ("before", "after")


def checks(
    hosts: Mapping[str, Any], profile: Profile, tokens: int | None, plan: Mapping[str, Any]
) -> list[Check]:
    """The checks of a drop's other evidence. hosts: host/<host>.json by host. tokens: in and out,
    over all planned requests."""
    images = plan.get("images")
    found = [_images(images)] if isinstance(images, dict) and images else []
    found += [_inventory(hosts, profile, "gpus", _gpus)] if profile.gpus else []
    if profile.nics:
        found += [_inventory(hosts, profile, "nics", _nics), _domains(hosts, profile)]
        found += [_counters(hosts, profile, tokens, plan)]
    return found


def _check(
    outcome: Outcome,
    *,
    name: str,
    why: str,
    want: str,
    got: str,
    remedy: str,
    required: bool = False,
) -> Check:
    return Check(
        id=name,
        group="witness",
        severity="required" if required or outcome == "failed" else "noted",
        outcome=outcome,
        why=why,
        expected=want,
        actual=got,
        remedy="" if outcome == "met" else remedy,
    )


def _images(images: Mapping[str, Any]) -> Check:
    loose = sorted(name for name, digest in images.items() if "sha256:" not in str(digest))
    return _check(
        "failed" if loose else "met",
        name="images",
        why="images are named by digest: a tag can move",
        want="a sha256 digest for each image",
        got=f"by tag only: {', '.join(loose)}" if loose else f"{len(images)} images by digest",
        remedy="Run from images by digest.",
    )


def _nics(host: Mapping[str, Any], _profile: Profile) -> int | None:
    return len(host["nics"]) if isinstance(host.get("nics"), list) else None


def _domains(hosts: Mapping[str, Any], profile: Profile) -> Check:
    """What the hosts' own fi_info offered. Noted: the ranks use their image's libfabric, of which
    the logs speak."""
    fabric = profile.fabric
    counts = {
        name: len(offers.get((fabric.provider, fabric.fabric), ()))
        for name, host in hosts.items()
        if (offers := _offers(host)) is not None
    }
    right = len(counts) == profile.hosts and set(counts.values()) == {profile.nics}
    return _check(
        "met" if right else "unchecked",
        name="fi-info",
        why="every host's libfabric offered a domain of the fabric on each NIC",
        want=f"{profile.nics} of {fabric.provider}/{fabric.fabric} on {profile.hosts} hosts each",
        got=", ".join(f"{name}: {n}" for name, n in sorted(counts.items())) or "nobody was asked",
        remedy="Look at `fi_info -p efa` on that host (make doctor).",
    )


def _offers(host: Mapping[str, Any]) -> dict[tuple[str, str], set[str]] | None:
    """(provider, fabric) -> domains; None where nobody asked, or nothing answered."""
    captured = host.get("captured")
    said = captured.get("fi_info") if isinstance(captured, dict) else None
    if isinstance(said, dict) and said.get("rc") == 0:
        with contextlib.suppress(ValueError):
            return machine.parse_fi_info(str(said.get("out")))
    return None


def _gpus(host: Mapping[str, Any], profile: Profile) -> int | None:
    """How many of the host's GPUs are the profile's, by the name that the driver gives."""
    found = host.get("gpus")
    if not isinstance(found, list):
        return None
    return sum(isinstance(x, dict) and profile.gpu in str(x.get("name")) for x in found)


def _inventory(
    hosts: Mapping[str, Any],
    profile: Profile,
    what: str,
    count: Callable[[Mapping[str, Any], Profile], int | None],
) -> Check:
    """What the hosts have beside what the profile has. Every run writes it down before it starts
    anything, so that a drop without it is no proof."""
    want: int = getattr(profile, what)
    counts = {name: n for name, host in hosts.items() if (n := count(host, profile)) is not None}
    short = any(n < want for n in counts.values())
    kind = f" of {profile.gpu}" if what == "gpus" and profile.gpu else ""
    return _check(
        "failed" if short else "met" if len(counts) == profile.hosts else "unchecked",
        name=what,
        why=f"every host has the {what.upper().replace('S', 's')} of the profile",
        want=f"{want}{kind} on each of {profile.hosts} hosts",
        got=", ".join(f"{name}: {n}" for name, n in sorted(counts.items())) or "no inventory",
        remedy="Judge against the profile that ran, or repair the hosts (make doctor).",
        required=True,
    )


def _counters(
    hosts: Mapping[str, Any], profile: Profile, tokens: int | None, plan: Mapping[str, Any]
) -> Check:
    sent = [x for x in (_sent(host) for host in hosts.values()) if x is not None]
    least = _least(profile, tokens, plan)
    known = len(sent) == profile.hosts and least is not None
    enough = sum(sent) >= (least or 0)
    return _check(
        "unchecked" if not known else "met" if enough else "failed",
        name="efa-bytes",
        why="the NICs carried at least what the tokens needed",
        want=f"at least {least:.3g} bytes"
        if least is not None
        else "the model's shape in the plan",
        got=f"{sum(sent):.3g} bytes from {len(sent)} of {profile.hosts} hosts",
        remedy="The exchange did not go over EFA, or the counters were read at the wrong time.",
    )


def _sent(host: Mapping[str, Any]) -> int | None:
    """Bytes a host sent between the two readings; None where a counter is absent or ran back."""
    counters = host.get("hw_counters")
    pair = [counters.get(when) if isinstance(counters, dict) else None for when in WHEN]
    if not all(isinstance(reading, dict) for reading in pair):
        return None
    before, after = (_sums(reading) for reading in pair)
    if before is None or after is None or after < before:
        return None
    return after - before


def _sums(reading: Any) -> int | None:
    values = [
        counter.get(name) if isinstance(counter, dict) else None
        for counter in reading.values()
        for name in SENT
    ]
    known = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return sum(known) if known and len(known) == len(values) else None


def _least(profile: Profile, tokens: int | None, plan: Mapping[str, Any]) -> float | None:
    """A lower bound of the bytes between hosts: every token's hidden vector crosses at each MoE
    layer once with the chance that at least one of its top-k experts is elsewhere, one byte a value
    (FP8 dispatch; the combine, in BF16, comes on top and is left out)."""
    model = plan.get("model")
    shape = model.get("shape") if isinstance(model, dict) else None
    numbers = [_number(shape, key) for key in ("layers", "hidden", "topk")]
    if tokens is None or profile.hosts < 2 or any(number is None for number in numbers):
        return None
    layers, hidden, topk = (number or 0 for number in numbers)
    return float(tokens * layers * hidden * (1 - float(profile.hosts) ** -topk))


def _number(shape: Any, key: str) -> int | None:
    value = shape.get(key) if isinstance(shape, dict) else None
    return value if isinstance(value, int) and 0 < value < 1 << 32 else None
