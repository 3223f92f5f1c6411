"""An interrupted call of the engine leaves no state behind that breaks the next call."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.launches import launch
from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, tokens_of
from verl.rollout.embedded import pages, running, scheduler, waiting_pages
from verl.utils.errors import RolloutError

BOOKKEEPING = tuple(part.__file__ for part in (pages, running, scheduler, waiting_pages))


def interrupted(number: int, call: Callable[[], Any]) -> bool:
    """Make a call and raise KeyboardInterrupt before the `number`th line of the bookkeeping.

    Returns False if it has fewer lines.
    """
    left = number

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in BOOKKEEPING:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
def test_an_interrupt_in_the_bookkeeping_loses_no_page():
    """Run in a separate process, which frees no objects of other tests."""
    done = launch(1, interrupt_all)
    assert done.returncode == 0, done.stderr


def interrupt_all() -> None:
    """Interrupt every 47th line of the bookkeeping."""
    engine = make_engine(talkative_model("qwen2"), num_pages=3, max_num_seqs=4)

    def call() -> list[list[int]]:
        return tokens_of(run(engine, PROMPTS, n=3, max_new_tokens=6))

    whole = call()
    number = 1
    assert engine.statistics()["preemptions"] > 0
    while interrupted(number, call):
        engine.check_integrity()
        assert call() == whole
        number += 47
    assert number > 1500, "all of the bookkeeping was to be interrupted"


def test_keys_that_were_not_computed_are_not_found(monkeypatch):
    model = talkative_model("qwen2")
    whole = tokens_of(run(make_engine(model, page_size=4), PROMPTS))
    engine = make_engine(model, page_size=4)
    run(engine, [[99, 98]], max_new_tokens=2)

    def fail(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("not enough memory")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(engine.runner, "prefill", fail)
        run(engine, PROMPTS)
    assert tokens_of(run(engine, PROMPTS)) == whole


@pytest.mark.parametrize("deterministic", [False, True])
def test_after_diverged_weights_good_ones_draw_again(deterministic: bool):
    model = talkative_model("qwen2")
    engine = make_engine(model, deterministic=deterministic)
    whole = tokens_of(run(engine, PROMPTS[:1], n=2))
    good = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    engine.update_weights(model.named_parameters())
    with pytest.raises(RolloutError, match="not finite"):
        run(engine, PROMPTS, n=2)
    model.load_state_dict(good, strict=False)
    engine.update_weights(model.named_parameters())
    assert tokens_of(run(engine, PROMPTS[:1], n=2)) == whole
