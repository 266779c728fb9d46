"""Images that are here, each judged by its own tests and by its parents'."""

import pytest
from tests.images.contained import EVERY, Container

from lanekit import images
from lanekit.errors import ConfigError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stack", default=images.DEFAULT_STACK, help="stack of the images to judge")
    parser.addoption("--built", default="", help="images that must be here; else all found")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "of(name): judges this image and all that build on it")


def _here(config: pytest.Config) -> list[str]:
    """The images to judge: those named, or those found; none without an engine."""
    named: list[str] = config.getoption("--built").split()
    if named:
        return named
    stack = config.getoption("--stack")
    try:
        listed = images.docker().image.list()
    except ConfigError:
        return []
    tags = {tag for image in listed for tag in image.repo_tags or ()}
    return [name for name in images.targets() if images.local(name, stack) in tags]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("of")
    if marker is None:
        return
    wanted = marker.args[0]
    found = [
        name
        for name in _here(metafunc.config)
        if wanted in (EVERY, name) or wanted in images.ancestors(name)
    ]
    skip = pytest.param("", marks=pytest.mark.skip(reason=f"no image of {wanted} is here"))
    metafunc.parametrize("image", found or [skip])


@pytest.fixture
def container(image: str, request: pytest.FixtureRequest) -> Container:
    return Container(image, request.config.getoption("--stack"))
