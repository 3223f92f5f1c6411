"""The run: its length, and its logs, checkpoints and resumes."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.setting import alias, setting

_NO_PROFILER = "no profiler is started; trainer.profile_steps writes timelines"


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    """Ranks of each role, counted over all machines from 0.

    Roles with the same ranks share their processes and devices. Other roles have no rank in common
    and work at the same time.
    """

    actor: list[int] | None = setting(
        None, "ranks of the actor, [0,1] for example; null: all that no other role is given"
    )
    rollout: list[int] | None = setting(
        None, "ranks that generate, if they are not the actor's; null: the actor's"
    )
    critic: list[int] | None = setting(None, "ranks of the critic; null: the actor's")
    reference: list[int] | None = setting(None, "ranks of the reference; null: the actor's")
    reward_model: list[int] | None = setting(None, "ranks of the reward model; null: the actor's")
    teacher: list[int] | None = setting(
        None, "ranks of the teacher of distillation; null: the actor's"
    )


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """The record of a run in `default_local_dir/records`, for `verl view`, `compare`, `capsule`."""

    enable: bool = setting(True, "record every step: metrics, digests, and samples of the newest")
    keep_steps: int = setting(20, "newest steps whose samples are kept", above=0)
    max_mib: float = setting(
        2048.0, "MiB that all kept samples may take; the newest step always stays", above=0
    )
    weights: bool = setting(True, "record a fingerprint of every trained tensor after each step")


@dataclass(kw_only=True, slots=True)
class DeviceConfig:
    """The device of a process."""

    device: str | None = setting(
        None,
        "cpu or cuda; null: the first visible GPU, else the CPU",
        choices=("auto", "cpu", "cuda"),
    )
    num_threads: int | None = setting(
        None, "CPU threads that torch computes with; null: one a core", above=0
    )


@dataclass(kw_only=True, slots=True)
class MachinesConfig(DeviceConfig):
    """Where the ranks are, and how long a call on them may take."""

    nnodes: int = setting(1, "machines", above=0, at_most=100_000)
    n_gpus_per_node: int | None = setting(
        None,
        "ranks a machine: torchrun's where it launched them, else Ray's; null: those launched",
        above=0,
        at_most=1024,
    )
    deadline_s: float = setting(
        7200.0,
        "seconds that one call on the ranks may take (a generation, an update, a checkpoint) "
        "before the run ends with the stacks of all ranks",
        above=0,
    )


@dataclass(kw_only=True, slots=True)
class RunConfig(MachinesConfig):
    """The keys of any training run."""

    total_epochs: int | None = setting(
        30, "epochs; not read where total_training_steps is given", above=0
    )
    num_train_epochs: Any = alias("trainer.total_epochs", "epochs")
    total_training_steps: int | None = setting(
        None, "steps; null: total_epochs over the data", above=0
    )
    max_steps: Any = alias("trainer.total_training_steps", "steps")
    seed: int = setting(
        0,
        "seed of everything that is drawn: order of rows and sampling noise follow it",
        at_least=0,
    )
    project_name: str = setting("verl_examples", "project, for trackers and folders")
    experiment_name: str = setting("gsm8k", "experiment, for trackers and folders")
    logger: Any = setting(
        ["console"],
        "where metrics go: console, file, tensorboard, wandb, mlflow, swanlab",
        many=True,
    )
    log_interval: int = setting(1, "steps between two lines on the console", above=0)
    progress: bool = setting(
        True,
        "report phases that take long: one line in a terminal, a line of the log every ten "
        "seconds elsewhere",
    )
    record: RecordConfig = field(default_factory=RecordConfig)
    val_before_train: bool = setting(
        True, "validate before the first step, where there are validation files"
    )
    test_freq: int = setting(-1, "steps between validations; -1: none", at_least=-1)
    max_nonfinite_steps: int = setting(
        3, "skipped steps in a row (loss or gradient not finite) that stop the run", above=0
    )
    save_freq: int = setting(-1, "steps between checkpoints; -1: none", at_least=-1)
    async_save: bool = setting(
        False, "write checkpoints while the run goes on, from a copy in host memory"
    )
    default_local_dir: str = setting(
        "checkpoints/verl_examples/gsm8k",
        "folder of checkpoints",
        follows="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        is_path=True,
    )
    default_hdfs_dir: str | None = setting(
        None,
        "remote copy of checkpoints",
        planned="checkpoints are written to a local or mounted folder only",
    )
    resume_mode: str = setting(
        "auto",
        "auto: from the newest whole checkpoint; resume_path: from resume_from_path",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = setting(None, "a global_step_N folder", is_path=True)


@dataclass(kw_only=True, slots=True)
class TrainerConfig(RunConfig):
    mode: str = setting(
        "sync",
        (
            "the schedule: generation and update take turns (sync); the next batch is generated "
            "during the update (one_step_off); generation runs ahead, see async_training "
            "(fully_async)"
        ),
        choices=("sync", "one_step_off", "fully_async"),
    )
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    log_val_generations: int = setting(0, "validation samples that trackers show", at_least=0)
    rollout_data_dir: str | None = setting(
        None,
        "folder for the training samples of each step; the score of a dropped one is null",
        is_path=True,
    )
    validation_data_dir: str | None = setting(
        None, "folder for the validation samples", is_path=True
    )
    val_only: bool = setting(False, "validate and stop")
    dynamic_validation: bool = setting(
        False,
        (
            "the rollout's ranks draw a validation while the trainer goes on with the next step; "
            "its metrics are logged at its own step"
        ),
    )
    critic_warmup: int = setting(0, "first steps that train the critic alone", at_least=0)
    max_actor_ckpt_to_keep: int | None = setting(
        None, "newest checkpoints kept; null: all", above=0
    )
    max_critic_ckpt_to_keep: int | None = setting(
        None, "the same for the critic, which lies in the same folders; null: all", above=0
    )
    del_local_ckpt_after_load: bool = setting(
        False,
        "delete a checkpoint after it was read",
        no_effect="old checkpoints go by max_actor_ckpt_to_keep",
    )
    esi_redundant_time: float = setting(
        0.0,
        "seconds kept for a checkpoint before an instance expires",
        planned="expiry of an instance is not watched",
    )
    balance_batch: bool = setting(True, "even out tokens over ranks", no_effect="they always are")
    profile_steps: list[int] | None = setting(
        None,
        (
            "steps of which a timeline is written, a Chrome trace for each: "
            "default_local_dir/timeline/global_step_N.json"
        ),
    )
    controller_nsight_options: dict[str, Any] = setting(
        {}, "options of Nsight for the driver", no_effect=_NO_PROFILER
    )
    worker_nsight_options: dict[str, Any] = setting(
        {}, "options of Nsight for the workers", no_effect=_NO_PROFILER
    )
    npu_profile: dict[str, Any] = setting(
        {}, "options of the profiler of NPUs", no_effect=_NO_PROFILER
    )
    ray_wait_register_center_timeout: int = setting(
        300,
        "seconds Ray may take",
        no_effect="Ray is waited for as long as it says that it is starting",
    )
    use_legacy_worker_impl: str = setting(
        "auto", "choice between two implementations", no_effect="there is one"
    )


@dataclass(kw_only=True, slots=True)
class RayInitConfig:
    address: str | None = setting(
        None,
        "the cluster: HOST:6379, ray://HOST:10001, auto, or local for one of the run's own; "
        "null: RAY_ADDRESS, else one that was started on this machine, else the run's own",
    )
    namespace: str | None = setting(None, "Ray's namespace for the actors")
    runtime_env: Any = setting(
        None,
        (
            "a mapping or a YAML file that extends verl's own: its excludes are added, its "
            "env_vars win"
        ),
    )
    num_cpus: int | None = setting(None, "CPU cores that a Ray started here may use", above=0)
    timeline_json_file: str | None = setting(
        None, "file for Ray's timeline", no_effect="`ray timeline` writes it", is_path=True
    )
