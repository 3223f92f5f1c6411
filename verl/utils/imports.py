"""Loading optional packages and users' own files."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.errors import ConfigError, MissingDependencyError, VerlError, line_in
from verl.utils.registry import nearest_names


def require(module: str, purpose: str, install: str) -> ModuleType:
    """Import `module`, or say what needs it and the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package '{module}'. Install it: {install}"
        ) from error


def is_installed(package: str) -> bool:
    """Whether a package is there, by the name that it is installed by; nothing is imported."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def import_user_code(*paths_or_names: str | None) -> None:
    """`load_module` of whatever `model.external_lib` names, whose decorators may register anything;
    None is nothing.

    Every process of a run says so for itself before it looks anything up by name.
    """
    for path_or_name in dict.fromkeys(paths_or_names):
        if path_or_name is not None:
            load_module(path_or_name)


def load_module(path_or_name: str) -> ModuleType:
    """Import a user's `.py` file (once a process) or an importable module by its dotted name."""
    path = Path(path_or_name).expanduser()
    if path.suffix != ".py":
        try:
            module = importlib.import_module(path_or_name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"Cannot import '{path_or_name}': {error}. Give a .py file or an installed module."
            ) from error
        if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
            raise ConfigError(
                f"'{path_or_name}' is a folder without code of its own. Give a .py file in it."
            )
        return module

    if not path.is_file():
        raise ConfigError(f"Expected a Python file at '{path_or_name}', found none.")
    # The name depends on the path, so that two users' `reward.py` never shadow each other.
    name = f"verl_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, SyntaxError) and error.filename == spec.origin:
                raise ConfigError(
                    f"'{path}', line {error.lineno}, is not Python: {error.msg}. Mend that line."
                ) from error
            line = line_in(error, spec.origin)
            if (
                isinstance(error, ModuleNotFoundError)
                and error.name
                and _lies_beside(path, error.name)
            ):
                raise ConfigError(
                    f"'{path}', line {line}, imports '{error.name}', which lies beside it, where "
                    "Python does not look. Make that folder known: export "
                    f"PYTHONPATH={path.resolve().parent}"
                ) from error
            missing = missing_package(error) if isinstance(error, ModuleNotFoundError) else None
            if missing is not None:
                raise MissingDependencyError(
                    f"'{path}', line {line}: {missing[0].lower()}{missing[1:]}"
                ) from error
            if isinstance(error, Exception | SystemExit) and not isinstance(error, VerlError):
                raise ConfigError(
                    f"'{path}', line {line}, raised {type(error).__name__}: {error}. Mend it; "
                    "VERL_TRACEBACK=1 shows the way there."
                ) from error
            raise

    return sys.modules[name]


def _lies_beside(file: Path, module: str) -> bool:
    beside = file.parent / module.split(".")[0]
    return beside.is_dir() or beside.with_suffix(".py").is_file()


def load_extern_type(file_path: str, type_name: str) -> Any:
    """The object `type_name` from a user's file or module."""
    module = load_module(file_path)
    if not hasattr(module, type_name):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"'{file_path}' has no '{type_name}'. Nearest names in it: "
            f"{nearest_names(type_name, public)}."
        )
    return getattr(module, type_name)


# Packages that are installed under another name than they are imported by.
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
    """Return the name that `pip install` knows the package of a module by."""
    package = module.split(".")[0]
    return _INSTALLED_AS.get(package, package)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Describe an import that failed because a package is not installed (after `pip install
    --no-deps`, say); None if the module that was not found is one of ours."""
    name = (error.name or "").split(".")[0]
    if not name or name == "verl":
        return None
    return (
        f"The package '{name}' is not installed. Install it: pip install {distribution_of(name)} "
        "(`verl doctor` lists everything that is missing)"
    )
