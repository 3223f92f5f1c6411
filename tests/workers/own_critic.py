"""A custom critic: bounded, with its own forward."""

import torch
from torch import Tensor, nn

from verl.models.critic import CriticModel


class BoundedCritic(CriticModel):
    """Values from 0 to 2. Computed on padded rows, because it overrides `forward`."""

    def __init__(self, body):
        super().__init__(body)
        self.value_head = nn.Sequential(
            nn.Linear(body.config.hidden_size, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return 2 * torch.sigmoid(self.value_head(hidden))


class BoundedHead(CriticModel):
    """The same values by its head alone, and packed."""

    def __init__(self, body):
        super().__init__(body)
        self.value_head = nn.Sequential(
            nn.Linear(body.config.hidden_size, 8),
            nn.Tanh(),
            nn.Linear(8, 1),
            nn.Sigmoid(),
            Doubled(),
        )


class Doubled(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


class WrongShape(CriticModel):
    """One value a row."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask).sum(-1)


class WideHead(CriticModel):
    """Two values a token."""

    def __init__(self, body):
        super().__init__(body)
        self.value_head = nn.Linear(body.config.hidden_size, 2)


class Scattered(CriticModel):
    """A weight that no checkpoint would keep."""

    def __init__(self, body):
        super().__init__(body)
        self.scale = nn.Parameter(torch.ones(()))


not_a_critic = nn.Linear
