"""Make one environment of a bundle. Runs under the machine's own Python, without lanekit.

    python bundle_environment.py BUNDLE NAME TARGET

What NAME.linked lists is hard-linked from the environment of the Python that runs this; what
NAME.wheels lists is installed from BUNDLE/wheels, without an index. Exit 2 says what is missing.
"""

import compileall
import os
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path


def listed(file: Path) -> list[str]:
    """The lines of a list."""
    return file.read_text().split()


def find(wanted: list[str]) -> tuple[list[metadata.Distribution], list[str]]:
    """The distributions of this Python that `wanted` names, and what is wrong with the others."""
    found, wrong = [], []
    for item in wanted:
        name, _, version = item.partition("==")
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{item}: not found by {sys.executable}")
            continue
        if version and here.version != version:
            wrong.append(f"{item}: {sys.executable} has {here.version}")
        found.append(here)
    return found, wrong


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Hard-link the files inside site-packages; scripts stay, they name the other Python."""
    for file in distribution.files or ():
        if ".." in file.parts or file.is_absolute():
            continue
        source, target = Path(str(distribution.locate_file(file))), site / file
        if not source.is_file() or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copy2(source, target)


def _answers(ask: list[str]) -> bool:
    return subprocess.run(ask, check=False, capture_output=True).returncode == 0


def pip() -> list[str]:
    """A pip of 22.3 or later, which can install into another environment."""
    for python in (sys.executable, "python3"):
        ask = [python, "-m", "pip", "--version"]
        if shutil.which(python) and _answers(ask):
            return ask[:-1]
    raise SystemExit("bundle: no pip for this Python. Give one that has it: --python PATH")


def main() -> None:
    """Make the environment, or leave with what is missing."""
    bundle, name, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    distributions, wrong = find(listed(bundle / f"{name}.linked"))
    if wrong:
        print(f"bundle: {name} counts on packages of this machine's Python:", *wrong, sep="\n  ",
              file=sys.stderr)  # fmt: skip
        print("Make the bundle with this machine's own `pip freeze` as PRESENT=.", file=sys.stderr)
        raise SystemExit(2)
    venv.create(target, symlinks=True, clear=True, with_pip=False)
    site = next((target / "lib").glob("python3*/site-packages"))
    for distribution in distributions:
        link(distribution, site)
    wheels = [str(bundle / "wheels" / wheel) for wheel in listed(bundle / f"{name}.wheels")]
    if wheels:
        quiet = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
        offline = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        # A PYTHONPATH may name what to link; pip would take it for already installed.
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        into = ["--python", str(target / "bin" / "python"), "install"]
        done = subprocess.run([*pip(), *into, *quiet, *offline, *wheels], check=False, env=env)
        if done.returncode:
            raise OSError(f"pip could not install it, and says why above (exit {done.returncode})")
    # An engine starts six processes one after another; each read 20 s of source without bytecode.
    compileall.compile_dir(site, quiet=2, workers=0)
    print(f"bundle: {name}: {len(wheels)} installed, {len(distributions)} linked from {sys.prefix}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"bundle: {sys.argv[2]}: {error}", file=sys.stderr)
        print("Free space there, or put right what it names; then run this again.", file=sys.stderr)
        raise SystemExit(2) from None
