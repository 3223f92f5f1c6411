"""The program that torchrun starts on every rank: `torchrun --nproc_per_node=2 -m
tests.single_controller.torchrun_program`.

Prints the answers of the driver as one line of JSON; then rank 1 is killed.
"""

import json

from tests.single_controller import workers
from verl.single_controller.spmd import join

if __name__ == "__main__":
    pool = join()
    print("ANSWER " + json.dumps(workers.same_answers(pool)), flush=True)
    workers.killed(pool, 1)
