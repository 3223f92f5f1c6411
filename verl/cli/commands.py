"""The commands of `verl`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: `verl {words} ...` calls `main(argv) -> exit status` of `module`.

    `first` is put before the arguments of the user.
    """

    words: str
    module: str
    summary: str
    example: str
    first: tuple[str, ...] = ()


_ALL = (
    Command(
        words="doctor",
        module="verl.diagnostics.doctor",
        summary="check whether this machine is fit to train; print a fix for each fault",
        example="verl doctor",
    ),
    Command(
        words="plan",
        module="verl.diagnostics.plan",
        summary="predict memory and batches of a run before it starts, no GPU needed",
        example="verl plan --device-gib H100 run.yaml trainer.n_gpus_per_node=8",
    ),
    Command(
        words="reward check",
        module="verl.cli.reward_check",
        summary=(
            "score gold and wrong answers of a few rows, to see if the reward is worth training on"
        ),
        example="verl reward check data.dataset_name=toy custom_reward_function.path=reward.py",
    ),
    Command(
        words="train",
        module="verl.trainer.main_ppo",
        summary="PPO, GRPO and related algorithms; --dry-run is `verl plan` of the same line",
        example="verl train data.dataset_name=toy data.train_batch_size=4 trainer.max_steps=10",
    ),
    Command(
        words="view",
        module="verl.jobs.main_view",
        summary="look at recorded runs in a browser: curves, time, samples, tokens",
        example="verl view checkpoints/toy/toy",
    ),
    Command(
        words="compare",
        module="verl.jobs.main_compare",
        summary="find the first step, phase, tensor and token in which two runs differ",
        example="verl compare checkpoints/toy/one checkpoints/toy/other",
    ),
    Command(
        words="capsule",
        module="verl.jobs.main_capsule",
        summary="put one step of a recorded run into a file",
        example="verl capsule checkpoints/toy/toy --step 7",
    ),
    Command(
        words="replay",
        module="verl.jobs.main_replay",
        summary="execute the step of a capsule again, and compare it phase by phase",
        example="verl replay toy-step-7.zip",
    ),
    Command(
        words="sft",
        module="verl.jobs.main_sft",
        summary="fine-tune on the assistant's tokens; --dry-run predicts memory alone",
        example="verl sft data.train_files=train.parquet model.path=Qwen/Qwen2.5-0.5B",
    ),
    Command(
        words="merge",
        module="verl.jobs.main_merge",
        summary="write a checkpoint as a Hugging Face folder",
        example="verl merge --local_dir checkpoints/toy/toy/global_step_10/actor --target_dir merged",
        first=("merge",),
    ),
    Command(
        words="generate",
        module="verl.jobs.main_generation",
        summary="generate responses to every prompt of a file",
        example=(
            "verl generate model.path=merged data.path=test.parquet data.output_path=out.parquet"
        ),
    ),
    Command(
        words="eval",
        module="verl.jobs.main_eval",
        summary="score generated responses: mean, pass@k, maj@k",
        example="verl eval data.path=out.parquet",
    ),
    Command(
        words="serve",
        module="verl.jobs.main_serve",
        summary="serve a model to clients of OpenAI's API",
        example="verl serve merged server.port=8000",
    ),
)
COMMANDS = {command.words: command for command in _ALL}
