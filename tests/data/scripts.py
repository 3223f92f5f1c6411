"""The scripts of `examples/` as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_script(relative: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"example_{Path(relative).stem}", EXAMPLES / relative
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
