"""Packages that verl needs, directly or through another package, and that are missing.

Written so that it also works where `packaging`, which reads requirements, is itself missing.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verl.diagnostics.world import World, canonical
from verl.utils.imports import distribution_of

CONDA_TORCH = ("pytorch", "libtorch")  # names of torch in conda
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""extra == ["']([\w-]+)["']""")


@dataclass(frozen=True)
class Needed:
    """A requirement that holds on this machine; `extra` names the option it belongs to."""

    name: str  # canonical
    wanted: str  # as pip takes it: transformers<6,>=5
    extra: str | None
    specifier: Any | None  # of packaging; None where that package is missing

    def accepts(self, version: str) -> bool:
        """Whether a version is within the range; True where ranges cannot be read."""
        return self.specifier is None or self.specifier.contains(version, prereleases=True)


@dataclass(frozen=True)
class Missing:
    """A package to install; `needed_by` is the package that asks for it, None for verl itself."""

    wanted: str
    needed_by: str | None = None


def read_requirement(text: str) -> Needed | None:
    """Read a line of a package's metadata; None where it does not hold on this machine."""
    in_extra = _EXTRA.search(text)
    extra = in_extra.group(1) if in_extra else None
    name = _NAME.match(text)
    assert name is not None, f"not a requirement: {text!r}"
    try:
        from packaging.requirements import Requirement
    except ImportError:
        # Markers cannot be evaluated: only requirements without one are certain to hold.
        wanted, _, marker = text.partition(";")
        if marker and extra is None:
            return None
        return Needed(canonical(name[0]), wanted.strip().replace(" ", ""), extra, None)

    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({"extra": extra or ""}):
        return None
    wanted = f"{requirement.name}{requirement.specifier}"
    return Needed(canonical(requirement.name), wanted, extra, requirement.specifier)


def required(texts: Iterable[str]) -> list[Needed]:
    """Return the requirements that hold here and belong to no extra."""
    read = [read_requirement(text) for text in texts]
    return [needed for needed in read if needed is not None and needed.extra is None]


def missing_packages(world: World) -> dict[str, Missing]:
    """Return all packages to install by canonical name, including requirements of packages."""
    missing: dict[str, Missing] = {}
    seen = set[str]()
    requirements = required(world.requirements or ())
    queue = [(needed, None) for needed in requirements]
    while queue:
        needed, needed_by = queue.pop(0)
        if needed.name in seen:
            continue
        seen.add(needed.name)
        package = world.packages.get(needed.name)
        if package is not None:
            queue += [(other, needed.name) for other in required(package.requires)]
        elif not _is_there_anyway(world, needed.name):
            missing[needed.name] = Missing(needed.wanted, needed_by)

    wanted = {needed.name: needed.wanted for needed in requirements}
    for module in world.absent_modules:
        distribution = distribution_of(module)
        name = canonical(distribution)
        missing.setdefault(name, Missing(wanted.get(name, distribution)))
    return missing


def install_command(missing: dict[str, Missing]) -> str:
    """Return one command that installs everything."""
    words = ["pip install"]
    for package in missing.values():
        has_range = re.search(r"[<>=!~]", package.wanted)
        words.append(f"'{package.wanted}'" if has_range else package.wanted)
    return " ".join(words)


def _is_there_anyway(world: World, name: str) -> bool:
    """Whether conda has a package, which may lack the metadata that pip reads."""
    if name == "torch":
        loaded = world.probed.torch is not None
        return loaded or bool(world.conda_packages.keys() & set(CONDA_TORCH))
    return name in {canonical(package) for package in world.conda_packages}
