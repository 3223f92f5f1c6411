"""Read files of prompts and make batches of them. Public names load on first use."""

from typing import TYPE_CHECKING

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.data.build import build_dataset as build_dataset
    from verl.data.build import build_sampler as build_sampler
    from verl.data.loader import RLDataLoader as RLDataLoader
    from verl.data.rl_dataset import RLDataset as RLDataset
    from verl.data.sft_dataset import SFTDataset as SFTDataset

__all__ = ["RLDataLoader", "RLDataset", "SFTDataset", "build_dataset", "build_sampler"]


__getattr__ = lazy_names(
    __name__,
    {
        "RLDataLoader": "verl.data.loader",
        "RLDataset": "verl.data.rl_dataset",
        "SFTDataset": "verl.data.sft_dataset",
        "build_dataset": "verl.data.build",
        "build_sampler": "verl.data.build",
    },
)
