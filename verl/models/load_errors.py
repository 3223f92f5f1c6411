"""Say why a tokenizer or a model cannot be loaded, and how to get one that can."""

import shlex
import socket
from pathlib import Path

from huggingface_hub import errors as hub
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE

from verl.checkpoint.hf import WEIGHTS_FOLDER
from verl.models.lora import ADAPTER_CONFIG
from verl.models.role_folders import has_weights, nearest_role
from verl.utils.errors import ModelError, causes
from verl.utils.lfs import describe_pointers


def need_files(source: str, patterns: tuple[str, ...], part: str, usual: str) -> None:
    """Raise ModelError if a local folder has no file of these patterns.

    transformers' own messages would mention the hub.
    """
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in patterns):
        raise ModelError(
            f"The folder '{source}' has no {part}: expected {usual}. {_way_to_model(folder)}"
        )


def _way_to_model(folder: Path) -> str:
    """Say how to get a model from a folder that lacks a part of one."""
    inner = folder / WEIGHTS_FOLDER
    if has_weights(inner):
        return f"Give its folder '{inner}'."
    role = nearest_role(folder)
    if role is not None:
        return (
            "It belongs to a checkpoint of training. Write that as a model, and give the new "
            f"folder: verl merge --local_dir {role} --target_dir merged"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return _way_to_merged(folder)
    if any(folder.glob("*.gguf")):
        return (
            "It holds files in GGUF, a format for inference. Download the model that they were "
            "made from, as safetensors."
        )
    return "Copy the missing files there, or save them with save_pretrained."


def _way_to_merged(folder: Path) -> str:
    """Say how to merge a folder of adapters of peft into the model that they belong to."""
    code = (
        "import sys; from peft import AutoPeftModelForCausalLM as A; "
        "A.from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained(sys.argv[2])"
    )
    return (
        "It holds adapters (LoRA) and no model. Merge them into their base model, copy its "
        f'tokenizer, and give the new folder: python -c "{code}" {shlex.quote(str(folder))} merged'
    )


def need_hub(source: str, part: str) -> None:
    """Raise ModelError for a hub id that is neither cached nor reachable.

    The hub's own client would retry for a minute.
    """
    if Path(source).is_dir() or HF_HUB_OFFLINE:
        return
    if try_to_load_from_cache(source, "config.json") is not None:
        return

    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except Exception as error:
        # Releases of the hub's client raise errors of different libraries. If it is no error of the
        # network, loading raises it again.
        if any(isinstance(cause, (socket.gaierror, ConnectionError)) for cause in causes(error)):
            raise _unreachable(source, part) from error


def _unreachable(source: str, part: str) -> ModelError:
    return ModelError(
        f"There is no folder '{source}' here, and the hub cannot be reached for its {part}. On a "
        f"machine with a network, run: hf download {source} --local-dir <folder>; then give that "
        "folder as the model path."
    )


def explained(source: str, part: str, error: Exception) -> ModelError:
    """Turn an error of loading into a ModelError with the fix."""
    kinds = {type(cause) for cause in causes(error)}

    def is_a(*classes: type[BaseException]) -> bool:
        return any(issubclass(kind, classes) for kind in kinds)

    if is_a(hub.GatedRepoError):
        return ModelError(
            f"The hub repository '{source}' is gated. Accept its terms on "
            f"https://huggingface.co/{source} and log in: hf auth login"
        )
    if is_a(hub.RepositoryNotFoundError):
        return ModelError(
            f"There is no folder '{source}' here and no such repository on the hub (or it is "
            "private). Check the name; for a private one log in: hf auth login"
        )
    if is_a(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError):
        return _unreachable(source, part)

    files = (file for file in sorted(Path(source).glob("*")) if file.is_file())
    pointer = describe_pointers(files)
    if pointer is not None:
        return ModelError(f"Cannot load the {part} from '{source}': {pointer}")

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        lines = [type(error).__name__]
    # Some errors have the reason in a second line.
    count = 2 if lines[0].endswith(":") else 1
    reason = " ".join(lines[:count])
    if "ignore_mismatched_sizes" in reason:
        reason = "the shapes of weights do not match its configuration and override_config"
    return ModelError(
        f"Cannot load the {part} from '{source}': {reason.rstrip('.')}. If the model has its own "
        "code, set trust_remote_code=true; if files are damaged, download them again."
    )
