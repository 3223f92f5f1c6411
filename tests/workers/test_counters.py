"""Metrics of several engines become those of the step."""

from verl.workers.counters import combine_metrics


def test_a_mean_counts_every_episode_alike():
    several = {"a/mean": 1.0, "a/min": 0.5, "a/max": 2.0, "a/count": 3.0, "calls": 4.0}
    single = {"a/mean": 5.0, "a/min": 5.0, "a/max": 5.0, "a/count": 1.0, "calls": 2.0}
    assert combine_metrics([several, single]) == {
        "a/mean": 2.0,
        "a/min": 0.5,
        "a/max": 5.0,
        "calls": 6.0,
    }
    assert combine_metrics([{}, single, {}])["a/mean"] == 5.0
