"""A CycloneDX bill of materials from what an image says it holds.

Made by a library from the built image: the usual scanner is an image of a public registry itself.
"""

import hashlib
import json

from lanekit.images import Contents


def of(name: str, held: Contents, digest: str) -> bytes:
    """The bill as CycloneDX JSON, the same bytes for the same image."""
    from cyclonedx.model.bom import Bom, BomMetaData  # noqa: PLC0415 (0.5 s, for publishing only)
    from cyclonedx.model.component import Component, ComponentType  # noqa: PLC0415
    from cyclonedx.output import make_outputter  # noqa: PLC0415
    from cyclonedx.schema import OutputFormat, SchemaVersion  # noqa: PLC0415
    from packageurl import PackageURL  # noqa: PLC0415

    image = Component(
        name=name, version=digest, type=ComponentType.CONTAINER, bom_ref=f"{name}@{digest}"
    )
    bill = Bom(metadata=BomMetaData(component=image))
    system = held.system.split()[:1] or ["debian"]  # "Ubuntu 24.04.3 LTS"
    kinds = (("pypi", None, held.packages), ("deb", system[0].lower(), held.debian))
    for kind, space, packages in kinds:
        for package, version in packages.items():
            where = PackageURL(type=kind, namespace=space, name=package, version=version)
            bill.components.add(
                Component(
                    name=package, version=version, purl=where, type=ComponentType.LIBRARY,
                    bom_ref=str(where),
                )
            )  # fmt: skip
    bill.register_dependency(image, bill.components)
    made = json.loads(
        make_outputter(bill, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()
    )
    # A serial number and a time would make every bill of one image another file.
    made.pop("serialNumber", None)
    made.get("metadata", {}).pop("timestamp", None)
    return json.dumps(made, indent=1, sort_keys=True).encode() + b"\n"


def sha256(bill: bytes) -> str:
    """The checksum kept in images.lock beside the digest."""
    return hashlib.sha256(bill).hexdigest()


def packages(bill: bytes) -> dict[str, str]:
    """The Python packages in a bill that `of` made: name -> version."""
    found = json.loads(bill).get("components", ())
    return {c["name"]: c["version"] for c in found if c.get("purl", "").startswith("pkg:pypi/")}
