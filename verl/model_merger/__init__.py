"""From a checkpoint of training to a folder that transformers loads: `python -m
verl.model_merger`."""
