"""Programs that are not the RL loop: fine-tuning, generation, evaluation, merging checkpoints."""
