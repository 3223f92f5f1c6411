"""What can follow `verl` on a command line."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """`verl {words} ...` calls `main(argv) -> exit status` of `module`, with `first` before what
    the user wrote."""

    words: str
    module: str
    summary: str
    example: str
    first: tuple[str, ...] = ()
    takes_keys: bool = True  # key=value, and a YAML file instead of --config-path and --config-name


COMMANDS = {
    command.words: command
    for command in (
        Command(
            words="doctor",
            module="verl.diagnostics.doctor",
            summary="check whether this machine is fit to train; print a fix for each fault",
            example="verl doctor",
            takes_keys=False,
        ),
        Command(
            words="plan",
            module="verl.diagnostics.plan",
            summary="memory and batches of a run before it starts, no GPU needed",
            example="verl plan --device-gib H100 run.yaml trainer.n_gpus_per_node=8",
        ),
        Command(
            words="reward check",
            module="verl.cli.reward_check",
            summary="score gold and wrong answers of a few rows: is the reward worth training on",
            example="verl reward check data.dataset_name=toy custom_reward_function.path=reward.py",
        ),
        Command(
            words="train",
            module="verl.trainer.main_ppo",
            summary="PPO, GRPO and their kin; --dry-run is `verl plan` of the same line",
            example="verl train data.dataset_name=toy data.train_batch_size=4 trainer.max_steps=10",
        ),
        Command(
            words="sft",
            module="verl.jobs.main_sft",
            summary="supervised fine-tuning on the assistant's tokens",
            example="verl sft data.train_files=train.parquet model.path=Qwen/Qwen2.5-0.5B",
        ),
        Command(
            words="merge",
            module="verl.jobs.main_merge",
            summary="a checkpoint to a Hugging Face folder",
            example="verl merge --local_dir checkpoints/global_step_10/actor --target_dir merged",
            first=("merge",),
            takes_keys=False,
        ),
        Command(
            words="generate",
            module="verl.jobs.main_generation",
            summary="responses to every prompt of a file",
            example=(
                "verl generate model.path=merged data.path=test.parquet "
                "data.output_path=out.parquet"
            ),
        ),
        Command(
            words="eval",
            module="verl.jobs.main_eval",
            summary="scores of generated responses: mean, pass@k, maj@k",
            example="verl eval data.path=out.parquet",
        ),
    )
}
