"""Names of registered parts."""

import pytest

from verl.utils.errors import ConfigError
from verl.utils.registry import Registry


@pytest.mark.parametrize("name", [5, None, ""])
def test_a_part_needs_a_name(name):
    with pytest.raises(ConfigError, match="A policy loss is registered under a name"):
        Registry("policy loss").register(name)


def test_a_decorator_without_parentheses_is_an_error():
    losses = Registry("policy loss")
    with pytest.raises(ConfigError, match=r'under a name: @register\("leaky"\), got <function'):

        @losses.register
        def leaky(inputs):
            return inputs

    assert list(losses) == []
