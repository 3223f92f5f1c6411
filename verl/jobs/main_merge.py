"""`python -m verl.model_merger merge|test --backend fsdp --local_dir .../global_step_N/actor`."""

import argparse
import sys
from pathlib import Path

from verl.utils.entry import exit_code
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

DTYPES = ("float32", "bfloat16", "float16")
# Options of verl 0.5 that are accepted, and why each has nothing to do here.
WITHOUT_EFFECT = {
    "--tie-word-embedding": "the checkpoint's own configuration says whether the head is tied",
    "--is-value-model": "the checkpoint's own configuration says that it is a critic",
    "--use_cpu_initialization": "the merge never uses a GPU",
    "--hf_model_path": "configuration and tokenizer are in the checkpoint's folder huggingface",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code; user errors print one line, without a traceback."""
    words = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if words and words[0].startswith("--") and words[0] != "--help":
        parser.error(
            f"expected merge or test before the options: {parser.prog} merge {words[0]} ..."
        )
    arguments = parser.parse_args(words)
    return exit_code(lambda: print(_run(arguments)))


def _run(arguments: argparse.Namespace) -> str:
    """Run the command. Imports are local: a missing argument is reported before torch loads."""
    if arguments.backend != "fsdp":
        raise ConfigError(
            f"Expected --backend fsdp, got {arguments.backend}: there is no Megatron backend, and "
            "--backend fsdp reads checkpoints of this package from any number of ranks."
        )

    for option, why in WITHOUT_EFFECT.items():
        if getattr(arguments, _name(option)):
            logger.warning("%s has no effect: %s.", option, why)

    import torch

    from verl.jobs.merge import compare, export_adapters, merge, upload

    settings = {"base_model": arguments.base_model, "dtype": getattr(torch, arguments.dtype)}
    if arguments.command == "test":
        count = compare(arguments.local_dir, arguments.test_hf_dir, **settings)
        return f"All {count} tensors of {arguments.test_hf_dir} are those of {arguments.local_dir}."

    if arguments.no_merge_adapters:
        export_adapters(arguments.local_dir, arguments.target_dir)
    else:
        merge(arguments.local_dir, arguments.target_dir, **settings)

    written = f"Written: {arguments.target_dir}"
    if arguments.hf_upload_path:
        address = upload(arguments.target_dir, arguments.hf_upload_path, private=arguments.private)
        written += f"\nUploaded: {address}"
    return written


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m verl.model_merger", description="Write checkpoints as Hugging Face folders."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_merge = commands.add_parser("merge", prog="verl merge", help="write a Hugging Face folder")
    to_test = commands.add_parser(
        "test", help="compare a checkpoint with a Hugging Face folder, tensor by tensor"
    )

    for command in (to_merge, to_test):
        command.add_argument(
            "--backend",
            default="fsdp",
            choices=("fsdp", "megatron"),
            help="fsdp is the only backend",
        )
        command.add_argument(
            "--local_dir",
            required=True,
            type=Path,
            help="a role's folder of a checkpoint: .../global_step_N/actor",
        )
        command.add_argument(
            "--dtype",
            default="float32",
            choices=DTYPES,
            help="dtype of the weights (default: float32, as saved)",
        )
        command.add_argument(
            "--base_model",
            help="LoRA: folder or hub name of the frozen weights, if they have moved since training",
        )

        for option in WITHOUT_EFFECT:
            takes_value = option == "--hf_model_path"
            action = "store" if takes_value else "store_true"
            command.add_argument(option, action=action, help=argparse.SUPPRESS)

    to_merge.add_argument("--target_dir", required=True, type=Path, help="the folder to write")
    to_merge.add_argument(
        "--no-merge-adapters",
        action="store_true",
        help="LoRA: write only the adapters, in peft's format",
    )
    to_merge.add_argument(
        "--hf_upload_path", help="a repository of the Hugging Face hub to upload the folder to"
    )
    to_merge.add_argument("--private", action="store_true", help="make that repository private")
    to_test.add_argument(
        "--test_hf_dir", required=True, type=Path, help="the folder to compare with"
    )

    return parser


if __name__ == "__main__":
    sys.exit(exit_code(main))
