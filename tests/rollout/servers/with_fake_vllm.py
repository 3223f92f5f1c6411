"""Have `import vllm` give the fake one, over the packaged toy, in a process that imports this."""

import sys

from tests.rollout.servers.fake import toy_model
from tests.rollout.servers.fake_vllm import modules
from verl.models.load import load_tokenizer

sys.modules.update(modules(toy_model, tokenizer=load_tokenizer("toy")))
