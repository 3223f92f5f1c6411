"""Programs that are not the RL loop: fine-tuning, generation, evaluation, export, serving."""
