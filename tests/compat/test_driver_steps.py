"""Steps of a recipe's driver under verl 0.5's names: masks, penalties, advantages, rewards."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.trainer.runs import TOY
from verl.config import AlgorithmConfig, PFPPOConfig, load_config
from verl.protocol import DataProto

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.trainer.config import AlgoConfig  # pyright: ignore
    from verl.trainer.config import PFPPOConfig as OldPFPPOConfig  # pyright: ignore
    from verl.trainer.ppo import core_algos, ray_trainer, reward  # pyright: ignore
    from verl.trainer.ppo.core_algos import FixedKLController  # pyright: ignore
    from verl.utils.reward_score import gsm8k, math, math_dapo  # pyright: ignore
    from verl.utils.reward_score import search_r1_like_qa_em as search_r1  # pyright: ignore
    from verl.workers.reward_manager import DAPORewardManager  # pyright: ignore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def batch() -> DataProto:
    tensors = {
        "responses": torch.zeros(4, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]] * 2),
        "token_level_scores": torch.tensor([[0.0, 0, 1], [0, 0, 0], [0, 0, 3], [0, 1, 0]]),
        "old_log_probs": torch.full((4, 3), -1.0),
        "ref_log_prob": torch.full((4, 3), -1.5),
        "values": torch.arange(12.0).reshape(4, 3),
    }
    return DataProto.from_dict(tensors, {"uid": np.array(["a", "a", "b", "b"], dtype=object)})


def test_response_mask():
    mask = ray_trainer.compute_response_mask(batch())
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]]


def test_kl_penalty_in_the_reward():
    data, metrics = ray_trainer.apply_kl_penalty(batch(), FixedKLController(0.1))
    expected = data.batch["token_level_scores"] - 0.05 * data.batch["response_mask"]
    torch.testing.assert_close(data.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    alone = core_algos.compute_rewards(
        data.batch["token_level_scores"],
        data.batch["old_log_probs"],
        data.batch["ref_log_prob"],
        0.1,
    )
    torch.testing.assert_close(alone[0], expected[0])


@pytest.mark.parametrize("name", ["grpo", core_algos.AdvantageEstimator.GRPO])
def test_advantages_of_groups(name):
    data = batch()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    same = ray_trainer.compute_advantage(data, name, norm_adv_by_std_in_grpo=False)
    assert same is data
    mask = [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]]
    of_row = torch.tensor([0.5, -0.5, 1.0, -1.0])[:, None] * torch.tensor(mask)
    torch.testing.assert_close(data.batch["advantages"], of_row)
    ray_trainer.compute_advantage(data, name)
    torch.testing.assert_close(data.batch["advantages"][0, 0].item(), 0.5**0.5, rtol=1e-4, atol=0)


def test_advantages_of_a_critic():
    data = batch()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    ray_trainer.compute_advantage(data, "gae", gamma=0.9, lam=0.8)
    columns = [data.batch[name] for name in ("token_level_rewards", "values", "response_mask")]
    expected = core_algos.compute_gae_advantage_return(*columns, gamma=0.9, lam=0.8)
    assert torch.equal(data.batch["advantages"], expected[0])
    assert torch.equal(data.batch["returns"], expected[1])


def test_pf_ppo_resamples_rows_by_score():
    torch.manual_seed(0)
    drawn = core_algos.compute_pf_ppo_reweight_data(batch(), "pow", 2.0)
    assert len(drawn) == 4
    assert 0 not in drawn.batch["token_level_scores"].sum(-1)
    torch.manual_seed(0)
    again = core_algos.compute_pf_ppo_reweight_data(batch(), "pow", 2.0)
    assert torch.equal(drawn.batch["values"], again.batch["values"])


@pytest.mark.parametrize(
    ("section", "pf_ppo"), [(AlgoConfig, OldPFPPOConfig), (AlgorithmConfig, PFPPOConfig)]
)
def test_advantages_with_pf_ppo_resample_the_rows(section, pf_ppo):
    data = batch()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    config = section(use_pf_ppo=True, pf_ppo=pf_ppo(reweight_method="max_min"))
    torch.manual_seed(0)
    drawn = ray_trainer.compute_advantage(data, "grpo", config=config)
    assert len(drawn) == 4
    assert set(drawn.batch["token_level_scores"].sum(-1).tolist()) <= {0.0, 3.0}


@pytest.mark.parametrize("pf_ppo", [None, {"reweight_method": "max_min"}])
def test_advantages_take_a_mapping_as_the_section(pf_ppo: dict[str, str] | None):
    data = batch()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    assert ray_trainer.compute_advantage(data, "grpo", config={"gamma": 1.0}) is data
    drawn = ray_trainer.compute_advantage(
        data, "grpo", config={"use_pf_ppo": True, "pf_ppo": pf_ppo}
    )
    scores = set(drawn.batch["token_level_scores"].sum(-1).tolist())
    assert 0 not in scores if pf_ppo is None else scores <= {0.0, 3.0}


def test_gspo_with_the_old_signature():
    old = torch.full((2, 2), -1.0)
    new = torch.full((2, 2), -0.8)
    gains = torch.ones(2, 2)
    config = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    loss, clipfrac, kl, _ = core_algos.compute_policy_loss_gspo(
        old, new, gains, torch.ones(2, 2), config=config
    )
    assert loss.item() == pytest.approx(-1.0004)
    assert clipfrac == 1
    assert kl.item() == pytest.approx(-0.2)


def test_rules():
    assert gsm8k.compute_score("so #### 1,234", "1234") == 1.0
    assert gsm8k.compute_score("so #### 5", "1234", format_score=0.1) == 0.1
    assert gsm8k.compute_score("it is 1234", "1234") == 0.0
    assert gsm8k.compute_score("it is 1234", "1234", method="flexible", score=2.0) == 2.0
    assert gsm8k.extract_solution("#### 12") == "12"
    assert math.compute_score("hence \\boxed{\\frac{1}{2}}", "\\frac{1}{2}") == 1.0
    assert math.compute_score("hence \\boxed{3}", "4") == 0.0
    assert math.last_boxed_only_string("a \\boxed{1} b \\fbox{2} c") == "\\boxed{2}"
    assert math.remove_boxed("\\boxed{x^{2}}") == "x^{2}"
    assert math.is_equiv("\\dfrac12", "\\dfrac12")
    assert math.is_equiv(None, None)
    assert not math.is_equiv(None, "1")


def test_rules_of_retool_and_search_r1():
    boxed = math_dapo.compute_score("so \\boxed{12}", "12", strict_box_verify=True)
    assert boxed == {"score": 1.0, "acc": True, "pred": "12"}
    none = math_dapo.compute_score("Answer: 12", "12", strict_box_verify=True)
    assert none == {"score": -1.0, "acc": False, "pred": None}
    assert math_dapo.compute_score("Answer: 3\nAnswer: $12$", "12")["score"] == 1.0
    assert math_dapo.compute_score("Answer: 3", "12") == {
        "score": -1.0,
        "acc": False,
        "pred": "3",
    }

    truth = {"target": ["The Beatles"]}
    assert search_r1.compute_score("<answer>beatles</answer>", truth) == 1.0
    assert search_r1.compute_score("<answer>Queen</answer>", truth, format_score=0.2) == 0.2
    assert search_r1.compute_score("Beatles", truth, format_score=0.2) == 0.0
    longer = "<answer>the Beatles, of course</answer>"
    assert search_r1.compute_score(longer, truth) == 0.0
    assert search_r1.compute_score_subem(longer, truth, score=2.0) == 2.0


def test_reward_manager_of_a_configuration(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'kind': 'own'}\n"
    )
    config = load_config(
        [*TOY, "reward_model.reward_manager=dapo", f"custom_reward_function.path={own}"]
    )
    tokenizer = SimpleNamespace(
        batch_decode=lambda ids, **_: ["text"] * len(ids), decode=lambda ids, **_: "text"
    )
    manager = reward.load_reward_manager(config, tokenizer, num_examine=0, max_resp_len=3)
    assert isinstance(manager, DAPORewardManager)
    assert manager.max_resp_len == 3
    assert config.reward_model.reward_kwargs == {}, "the caller's configuration stays"
    function = reward.get_custom_reward_fn(config)
    assert function("a", "b", "c")["kind"] == "own"
    assert function("a", "b", ground_truth="c", extra_info=None)["score"] == 0.5
    with pytest.raises(TypeError, match="4 positional"):
        function("a", "b", "c", None, "d")

    data = batch()
    data.batch["prompts"] = torch.zeros(4, 2, dtype=torch.long)
    scores, extra = reward.compute_reward(data, manager)
    assert scores.tolist() == [[0, 0, 0.5], [0, 0.5, 0]] * 2
    assert extra["kind"] == ["own"] * 4
