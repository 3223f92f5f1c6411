"""The rules that come with the package, one file per task. `verl/rewards/rules.py` imports all."""
