"""The rules that come with the package. One file a task; `verl/rewards/rules.py` imports them
all."""
