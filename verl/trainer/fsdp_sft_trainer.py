"""`python -m verl.trainer.fsdp_sft_trainer`: verl 0.5's name of `verl.trainer.main_sft`."""

import sys

from verl.trainer.main_sft import main as main

if __name__ == "__main__":
    sys.exit(main())
