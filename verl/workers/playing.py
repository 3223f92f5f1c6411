"""Play the episodes of a batch on one engine, and make columns of them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from verl import agents
from verl.config import ActorRolloutRefConfig, TrainConfig
from verl.data.build import build_picture_reader
from verl.distributed.collectives import Axis, gather_objects
from verl.models.load import load_causal_lm
from verl.rewards.sample import fields_of_plain_episode
from verl.rollout import RolloutEngine
from verl.rollout.trajectory import Trajectory
from verl.single_controller import emit, note_progress
from verl.utils.column_dicts import object_column
from verl.utils.errors import RolloutError
from verl.workers.stream import follow
from verl.workers.trained import model_source

# Trajectories, and the counters of the engine that drew them.
Played = tuple[list[Trajectory], dict[str, float]]


def make_agents(
    config: ActorRolloutRefConfig,
    tokenizer: Any,
    device: torch.device,
    *,
    stop_ids: Sequence[int],
    partners: Mapping[str, RolloutEngine],
    is_alone: bool,
    for_servers: bool,
    sharing: Axis,
    run: TrainConfig | None,
) -> "tuple[agents.AgentRunner, agents.Copies]":
    """Return the player of episodes on an engine, and the object that renews copies of its actor.

    Args:
        tokenizer: the actor's.
        stop_ids: tokens that end a turn.
        partners: the engines that draw the turns of other trained roles.
        is_alone: whether no actor shares the device, so that engines need not sleep.
        for_servers: whether the engine has servers, which read the images themselves.
        sharing: the ranks that share the actor's engine.
        run: the configuration of the whole run, for agent loops that read it.
    """
    policies: dict[str, agents.FrozenPolicy] = {}
    if sharing.rank == 0:  # the rank that plays the episodes
        policies = _frozen_policies(config, tokenizer, device, sleeps=not is_alone)

    trained = {role: agents.PartnerPolicy(role, engine) for role, engine in partners.items()}
    runner = agents.AgentRunner(
        config.rollout,
        tokenizer,
        stop_ids=stop_ids,
        model=config.model,
        run=run,
        pictures=build_picture_reader(
            config.model,
            tokenizer,
            for_servers=for_servers,
            keeps_images=run is not None and run.reward_model.images,
        ),
        policies=policies,
        partners=trained,
    )
    return runner, agents.Copies(config.rollout, policies)


def lead(
    runner: "agents.AgentRunner",
    episodes: Sequence["agents.Episode"],
    steps: "agents.EngineSteps",
    sharing: Axis,
    *,
    max_model_len: int,
    version: int,
) -> Played:
    """Play episodes, and give the engine's work to the ranks that share it.

    Reports (sample id, None) of every episode when it has ended.

    Args:
        runner: plays the episodes of this rank.
        steps: the calls on the engine.
        sharing: the ranks that share the engine.
        max_model_len: most tokens of a prompt and its response together.
        version: number of the weights.
    """
    client = agents.EngineClient(
        steps,
        max_model_len=max_model_len,
        version=version,
        announce=partial(gather_objects, axis=sharing),
    )
    ended = 0

    def note(trajectories: Sequence[Trajectory]) -> None:
        nonlocal ended
        ended += 1
        note_progress(ended, len(episodes), "episodes")
        emit((trajectories[0].row, None))

    answer: Any = None
    try:
        answer = runner.play(episodes, client, note), client.counters
    finally:
        # Also after an error: the others wait for it.
        gather_objects(answer, sharing)
    return answer


def follow_to_the_end(steps: "agents.EngineSteps", sharing: Axis) -> Played:
    """Make the engine's calls as the first of its ranks does in `lead`."""
    message = follow(steps, sharing)
    steps.engine.abort()
    if message is None:
        raise RolloutError("The rank that plays the episodes of this engine has failed.")
    return message


def episode_columns(
    trajectories: Sequence[Trajectory], with_pictures: bool = False
) -> dict[str, np.ndarray]:
    """Return the object columns of `RolloutWorker.play_episodes`.

    Args:
        with_pictures: also return `prepared_pictures`.
    """
    infos: list[dict[str, Any]] = []
    for each in trajectories:
        infos.append({**fields_of_plain_episode(), **each.extra, "num_turns": each.num_turns})

    num_turns = [each.num_turns for each in trajectories]
    columns: dict[str, list[Any]] = {
        "episode": [each.row for each in trajectories],
        "episode_part": [each.part for each in trajectories],
        "agent_role": [each.role for each in trajectories],
        "num_turns": num_turns,
        "agent_info": infos,
        "agent_reward": [each.reward for each in trajectories],
        "turn_rewards": [each.turn_rewards for each in trajectories],
        # The names of verl, for users' reward managers.
        "__num_turns__": num_turns,
        "reward_scores": [info["rollout_reward_scores"] for info in infos],
    }
    if with_pictures:
        columns["prepared_pictures"] = [each.pictures for each in trajectories]
    return {name: object_column(values) for name, values in columns.items()}


def _frozen_policies(
    config: ActorRolloutRefConfig, tokenizer: Any, device: torch.device, *, sleeps: bool
) -> "dict[str, agents.FrozenPolicy]":
    """Return the policies of frozen roles. Their engines sleep between batches if the rollout's do.

    Args:
        sleeps: False where nothing else needs the device.
    """
    rollout = config.rollout

    def own_model() -> Any:
        return load_causal_lm(
            **model_source(config.model),
            dtype=agents.host_dtype(rollout, device, on_cpu=config.model.dtype),
            max_length=rollout.longest_sequence,
        )

    return agents.make_policies(
        rollout,
        own_model=own_model,
        own_tokenizer=tokenizer,
        device=device,
        sleeps=rollout.free_cache_engine and sleeps,
    )
