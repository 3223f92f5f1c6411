"""Every column of a training batch: name, dtype, shape and the phase that writes it.

Letters used in shapes all over the package:
B rows of a batch, P padded prompt length, R padded response length, T = P + R, N packed tokens, M
response tokens among them, S packed sequences, V vocabulary, H hidden size, G responses per prompt,
C choices of experts of a token: layers with experts x experts that a token visits.

Prompts are padded on the left, responses on the right, so column P of a (B, T) tensor is always the
first response token. Only batches are padded: models see packed tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column of a batch.

    `dtype` is torch's name, or "object" for the columns of `non_tensor_batch`.
    """

    name: str
    dtype: str
    shape: str
    written_by: str
    meaning: str


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("raw_prompt_ids", "object", "B", "data", "list of prompt token ids, unpadded"),
        Column("raw_prompt", "object", "B", "data", "chat messages, a list of {role, content}"),
        Column(
            "data_source",
            "object",
            "B",
            "data",
            "name of the data set a row came from; picks the reward rule",
        ),
        Column("reward_model", "object", "B", "data", "{style, ground_truth}"),
        Column(
            "extra_info",
            "object",
            "B",
            "data",
            "anything the reward needs: index, split, answer, ...",
        ),
        Column("index", "object", "B", "data", "row number in its file"),
        Column(
            "prepared_pictures",
            "object",
            "B",
            "data, with a model that reads pictures",
            "prepared pictures of the prompt, then those of tools, in the order of their tokens",
        ),
        Column("uid", "object", "B", "generate", "one string per prompt; its G responses share it"),
        Column("prompts", "int64", "B P", "generate", "prompt ids, left-padded"),
        Column("responses", "int64", "B R", "generate", "response ids, right-padded"),
        Column("input_ids", "int64", "B T", "generate", "prompts and responses side by side"),
        Column("attention_mask", "int64", "B T", "generate", "1 where input_ids is a real token"),
        Column(
            "position_ids",
            "int64",
            "B T",
            "generate",
            "0-based position within the row's real tokens",
        ),
        Column(
            "response_mask",
            "int64",
            "B R",
            "generate",
            "1 where the model made the token (tool output is 0)",
        ),
        Column(
            "rollout_log_probs",
            "float32",
            "B R",
            "generate",
            "log-prob of each token as the rollout engine saw it",
        ),
        Column(
            "token_age",
            "int32",
            "B R",
            "generate, asynchronous",
            "versions between the weights that drew a token and those updated, -1 elsewhere",
        ),
        Column(
            "routed_experts",
            "uint8",
            "B R C",
            "generate with R3, evaluate_policies with R2",
            "experts of the token before each token, layer by layer; the dtype's largest number "
            "for none; int16 for more than 255 experts",
        ),
        Column(
            "turn_of_token",
            "int32",
            "B R",
            "generate, with agents",
            "number of the model's turn that drew a token, -1 elsewhere",
        ),
        Column(
            "episode", "object", "B", "generate, with agents", "number of the episode in its step"
        ),
        Column(
            "episode_part",
            "object",
            "B",
            "generate, with agents",
            "number of the row in its episode",
        ),
        Column(
            "agent_role", "object", "B", "generate, with agents", "agent that drew the row, or ''"
        ),
        Column("num_turns", "object", "B", "generate, with agents", "messages of the episode"),
        Column("__num_turns__", "object", "B", "generate, with agents", "num_turns, as in verl"),
        Column(
            "reward_scores",
            "object",
            "B",
            "generate, with agents",
            "rewards of tools and user, as in verl: rollout_reward_scores of agent_info",
        ),
        Column(
            "agent_info",
            "object",
            "B",
            "generate, with agents",
            "what the reward function gets in extra_info: messages, tool_rewards, turn_scores, ...",
        ),
        Column(
            "agent_reward",
            "object",
            "B",
            "generate, with agents",
            "score of the episode by its agent loop, or None",
        ),
        Column(
            "turn_rewards",
            "object",
            "B",
            "generate, with agents",
            "{turn: reward} of tools, interactions and environments",
        ),
        Column(
            "reward_baselines",
            "float32",
            "B",
            "collect",
            "score of the greedy response to the same prompt (ReMax)",
        ),
        Column(
            "rm_scores",
            "float32",
            "B R",
            "score",
            "reward model's score, at the last token of the response",
        ),
        Column("token_level_scores", "float32", "B R", "score", "reward before any KL penalty"),
        Column(
            "old_log_probs",
            "float32",
            "B R",
            "evaluate_policies",
            "log-probs of the policy before this update",
        ),
        Column(
            "entropys",
            "float32",
            "B R",
            "evaluate_policies",
            "entropy of the policy at each response token",
        ),
        Column(
            "sum_pi_squared",
            "float32",
            "B R",
            "evaluate_policies",
            "sum of squared probabilities at each token (optimal_token_baseline)",
        ),
        Column(
            "ref_log_prob",
            "float32",
            "B R",
            "evaluate_policies",
            "log-probs of the frozen reference",
        ),
        Column(
            "ref_states",
            "as computed",
            "B R H",
            "evaluate_policies",
            "last hidden states of the reference, where the loss has the exact KL",
        ),
        Column(
            "teacher_log_prob",
            "float32",
            "B R",
            "evaluate_policies",
            "log-probs of the teacher of distillation",
        ),
        Column(
            "teacher_states",
            "as computed",
            "B R H",
            "evaluate_policies",
            "last hidden states of the teacher, for a divergence over the whole vocabulary",
        ),
        Column(
            "values",
            "float32",
            "B R",
            "evaluate_policies",
            "critic's value before each response token",
        ),
        Column(
            "token_level_rewards",
            "float32",
            "B R",
            "estimate_advantages",
            "scores minus KL penalty",
        ),
        Column(
            "advantages",
            "float32",
            "B R",
            "estimate_advantages",
            "advantage of each response token",
        ),
        Column("returns", "float32", "B R", "estimate_advantages", "targets of the critic"),
        Column(
            "rollout_is_weights",
            "float32",
            "B R",
            "update",
            "importance weight of a token in the policy loss",
        ),
        Column(
            "selected",
            "float32",
            "B R",
            "update",
            "1 where the loss has picked the token (clip_cov, kl_cov)",
        ),
    )
}
