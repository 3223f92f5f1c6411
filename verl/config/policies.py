"""The policies that play the roles of an episode."""

from dataclasses import dataclass

from verl.config.setting import setting

SELF = "self"  # as `path`: a copy of the actor


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """A value of `agent.policies`: the policy of one role.

    A trained role is played by the actor or, with a `path`, by a policy of its own that is trained
    with the actor's settings. A frozen one is played by the model at `path`, or by the server at
    `url`, with the sampling parameters here.
    """

    trained: bool = setting(False, "its turns are learned from")
    path: str | None = setting(
        None,
        "folder or hub name of its model; self: a frozen copy of the actor; null: the actor",
        is_path=True,
    )
    lr: float | None = setting(
        None, "learning rate of a trained policy with a path; null: the actor's", at_least=0
    )
    update_freq: int | None = setting(
        None, "with path=self: steps from one copy of the actor to the next", above=0
    )
    url: str | None = setting(
        None, "base URL of a server with an OpenAI-compatible chat/completions"
    )
    model: str | None = setting(None, "name of the model at url")
    api_key_env: str | None = setting(None, "environment variable with the key of url")
    timeout_s: float = setting(120.0, "seconds that url may take for one turn", above=0)
    max_concurrent: int = setting(64, "requests to url at once, on a rank", above=0)
    temperature: float = setting(1.0, "divides the logits; 0 is greedy", at_least=0)
    top_k: int = setting(-1, "sample among the k likeliest tokens; -1: all", at_least=-1)
    top_p: float = setting(
        1.0, "sample among the likeliest tokens that make up this probability", above=0, at_most=1
    )
    max_new_tokens: int = setting(256, "most tokens of one turn", above=0)
    trust_remote_code: bool = setting(False, "run code from the folder at path")

    @property
    def is_partner(self) -> bool:
        """Return whether the role has a policy of its own that is trained next to the actor."""
        return self.trained and self.path is not None


def partner_role(role: str) -> str:
    """Return the name of the workers and checkpoints of a role's own trained policy."""
    return f"policy_{role}"
