"""A debate with a fixed judge: two roles, of which the judge's words give the reward."""

from verl.agents.environments import Observation


class Debate:
    """The player writes, the judge reads it and writes, and the player answers once more.

    The reward of an answer is its share of vowels, which a small model learns in a few steps. The
    judge loses as much as the player wins.
    """

    roles = ("player", "judge")

    def __init__(self, rounds: int = 2) -> None:
        self.rounds = rounds
        self.said: list[tuple[str, str]] = []  # role and text

    def reset(self, **row: object) -> Observation:
        return Observation([{"role": "user", "content": "Begin."}], role="player")

    def step(self, action: str) -> Observation:
        speaker = "player" if len(self.said) % 2 == 0 else "judge"
        self.said.append((speaker, action))
        heard = [{"role": "user", "content": action or "(silence)"}]
        if speaker == "judge":
            return Observation(heard, role="player")

        reward = sum(letter in "aeiou" for letter in action) / max(len(action), 1)
        is_over = len(self.said) >= 2 * self.rounds - 1
        return Observation(heard, reward, is_over, role="judge", rewards={"judge": -reward})

    def close(self) -> None:
        pass
