"""Have `import vllm` give the fake one, over the packaged toy, in a process that imports this."""

import sys

from tests.rollout.servers.fake import FakeServer, toy_model
from tests.rollout.servers.fake_vllm import modules
from verl.models.load import load_tokenizer


def make_server() -> FakeServer:
    server = FakeServer(toy_model)
    server.tokenizer = load_tokenizer("toy")
    return server


sys.modules.update(modules(make_server))
