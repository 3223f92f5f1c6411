"""Import optional packages and users' own files."""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.errors import (
    ConfigError,
    MissingDependencyError,
    VerlError,
    describe_error,
    frame_of,
    line_in,
    text_or_source,
)
from verl.utils.registry import nearest_names

USER_PREFIX = "verl_user_"  # of the names under which users' files are imported


def require(module: str, purpose: str, install: str) -> ModuleType:
    """Import `module`.

    Raises MissingDependencyError with the purpose and the command that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package '{module}'. Install it: {install}"
        ) from error


def is_installed(package: str) -> bool:
    """Return whether a package is installed, by its distribution name. Imports nothing."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def import_user_code(*named: str | Sequence[str] | None) -> None:
    """Load the modules that `model.external_lib` names, so that their decorators register parts.

    Each argument is a text, in which commas separate modules, or a list of texts; None is skipped.
    Every process of a run must call this before it looks up a name.
    """
    texts: list[str] = []
    for value in named:
        if value is not None:
            texts += [value] if isinstance(value, str) else value

    paths_or_names = [part.strip() for text in texts for part in text.split(",")]
    for path_or_name in dict.fromkeys(paths_or_names):
        if path_or_name:
            load_module(path_or_name, "model.external_lib")


def load_module(path_or_name: str, key: str | None = None) -> ModuleType:
    """Import a user's `.py` file (once per process), or a module by its dotted name.

    `pkg://package.module` and `file:///folder/file.py`, as verl writes them, are understood. `key`
    is the configuration key that names it, for errors.

    Raises ConfigError if it does not exist or fails to load, and MissingDependencyError if a
    package that it imports is not installed.
    """
    path_or_name = without_scheme(path_or_name)
    path = Path(path_or_name).expanduser()
    if path.suffix != ".py":
        return _import_by_name(path_or_name, key)
    if not path.is_file():
        raise ConfigError(
            _with_key(key, f"Expected a Python file at '{path_or_name}', found none.")
        )

    # The name depends on the path, so that two users' `reward.py` never shadow each other.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    name = f"{USER_PREFIX}{path.stem}_{digest[:8]}"
    if name not in sys.modules:
        _import_file(path, name)
    return sys.modules[name]


def file_of_user(module_name: str) -> str | None:
    """Return the file that `load_module` has imported under a name; None for another module."""
    if not module_name.startswith(USER_PREFIX):
        return None
    return getattr(sys.modules.get(module_name), "__file__", None)


def without_scheme(path_or_name: str) -> str:
    """Return the name of a module without `pkg://`, and a path without `file://`."""
    return path_or_name.removeprefix("pkg://").removeprefix("file://")


def _import_file(path: Path, name: str) -> None:
    """Import a file under a name of `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module

    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        explained = _explain_failure(path, spec.origin, error)
        if explained is None:
            raise
        raise explained from error


def _with_key(key: str | None, message: str) -> str:
    """Put the configuration key in front of a message, if there is one."""
    return message if key is None else f"{key}: {message[0].lower()}{message[1:]}"


def _import_by_name(name: str, key: str | None) -> ModuleType:
    if not name or name.startswith("."):
        message = f"Expected a .py file or the dotted name of a module, got '{name}'."
        if name and Path(name).is_dir():
            message += " That is a folder. Give the .py file in it."
        raise ConfigError(_with_key(key, message))

    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        way_out = "Give a .py file or an installed module, or add its folder to PYTHONPATH."
        if (error.name or "").split(".")[0] == "verl":
            way_out = "docs/reference/import_paths.md lists the names that this version has."
        message = f"Cannot import '{name}': {error}. {way_out}"
        raise ConfigError(_with_key(key, message)) from error
    except VerlError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"Cannot import '{name}', which raised {describe_error(error)}. Fix the "
            "module; VERL_TRACEBACK=1 shows the traceback."
        ) from error

    if getattr(module, "__file__", None) is None and list(getattr(module, "__path__", ())):
        raise ConfigError(f"'{name}' is a folder without code of its own. Give a .py file in it.")
    return module


def _explain_failure(path: Path, origin: str | None, error: BaseException) -> VerlError | None:
    """Return the error to raise for a user's file that failed to load; None keeps `error`."""
    if isinstance(error, SyntaxError) and error.filename == origin:
        return ConfigError(
            f"'{path}', line {error.lineno}, is not Python: {error.msg}. Fix that line."
        )

    line = line_in(error, origin)
    if isinstance(error, ModuleNotFoundError):
        if error.name and _is_neighbor(path, error.name):
            return ConfigError(
                f"'{path}', line {line}, imports '{error.name}', which is in the same folder. "
                "Python does not look there. Add that folder to its search path: export "
                f"PYTHONPATH={path.resolve().parent}"
            )
        missing = missing_package(error)
        if missing is not None:
            return MissingDependencyError(
                f"'{path}', line {line}: {missing[0].lower()}{missing[1:]}"
            )

    if isinstance(error, ImportError) and line in _relative_imports(path):
        module, folder = _place_in_package(path)
        return ConfigError(
            f"'{path}', line {line}, imports from its package, but a file that is given by its "
            f"path belongs to none. Give '{module}' instead of the path, and add the package's "
            f"folder to Python's search path: export PYTHONPATH={folder}"
        )

    if isinstance(error, Exception | SystemExit) and not isinstance(error, VerlError):
        text = text_or_source(error, frame_of(error, origin))
        return ConfigError(
            f"'{path}', line {line}, raised {type(error).__name__}: {text}. Fix the file; "
            "VERL_TRACEBACK=1 shows the traceback."
        )
    return None


def _is_neighbor(file: Path, module: str) -> bool:
    neighbor = file.parent / module.split(".")[0]
    return neighbor.is_dir() or neighbor.with_suffix(".py").is_file()


def _relative_imports(file: Path) -> set[int]:
    """Return the lines of the file's imports such as `from .helper import same`."""
    tree = ast.parse(file.read_bytes())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {node.lineno for node in imports if node.level > 0}


def _place_in_package(file: Path) -> tuple[str, Path]:
    """Return the dotted name of a package's file, and the folder that contains the package."""
    folder = file.resolve().parent
    names = [folder.name, file.stem]
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
        names.insert(0, folder.name)
    return ".".join(names), folder.parent


def load_extern_type(file_path: str, type_name: str, key: str | None = None) -> Any:
    """Return the object `type_name` from a user's file or module. See `load_module`."""
    module = load_module(file_path, key)
    if not hasattr(module, type_name):
        public = [name for name in dir(module) if not name.startswith("_")]
        raise ConfigError(
            f"'{file_path}' has no '{type_name}'. Nearest names in it: "
            f"{nearest_names(type_name, public)}."
        )
    return getattr(module, type_name)


# {import name: distribution name}, where the two differ.
_INSTALLED_AS = {
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "flash_attn": "flash-attn",
    "git": "GitPython",
    "google": "protobuf",
    "grpc": "grpcio",
    "hydra": "hydra-core",
    "jwt": "PyJWT",
    "magic": "python-magic",
    "math_verify": "math-verify",
    "pkg_resources": "setuptools",
    "quack": "quack-kernels",
    "rouge_score": "rouge-score",
    "sentence_transformers": "sentence-transformers",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}


def distribution_of(module: str) -> str:
    """Return the distribution name of a module's package, as `pip install` takes it."""
    package = module.split(".")[0]
    return _INSTALLED_AS.get(package, package)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Describe an import that failed because a package is not installed.

    Returns None if the missing module is one of ours.
    """
    name = (error.name or "").split(".")[0]
    if not name or name == "verl":
        return None
    return (
        f"The package '{name}' is not installed. Install it: pip install {distribution_of(name)} "
        "(`verl doctor` lists everything that is missing)"
    )
