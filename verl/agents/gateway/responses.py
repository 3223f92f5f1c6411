"""The JSON of replies, whole and in chunks of a stream, as OpenAI's API has it."""

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from verl.agents.gateway.requests import OutputSettings
from verl.agents.gateway.wording import Reply, Wording


class ChatFormat:
    """Replies to /v1/chat/completions.

    Args:
        response_id: of the whole answer.
        model: the name that the client gets.
        output: the form that the request asks for.
        wording: for the text of single tokens.
    """

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening: Mapping[str, Any] = {"delta": {"role": "assistant", "content": ""}}
    ending: Mapping[str, Any] = {"delta": {}}

    def __init__(
        self, response_id: str, model: str, output: OutputSettings, wording: Wording
    ) -> None:
        self.head = {
            "id": f"{self.prefix}{response_id}",
            "created": int(time.time()),
            "model": model,
        }
        self.output = output
        self.wording = wording

    # ---------------------------------------------------------------- whole answers

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        choices = [self._choice(number, reply) for number, reply in enumerate(replies)]
        answer = {**self.head, "object": self.kind, "choices": choices, "usage": usage(replies)}
        if self.output.token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def _choice(self, number: int, reply: Reply) -> dict[str, Any]:
        choice = {
            "index": number,
            "finish_reason": reply.finish_reason,
            **self._whole_text(reply),
            **self._tokens(reply.token_ids, reply.log_probs),
        }
        choice.setdefault("logprobs", None)
        return choice

    def _whole_text(self, reply: Reply) -> dict[str, Any]:
        return {"message": reply.message}

    def _piece_of_text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    # ---------------------------------------------------------------- chunks

    def first(self, number: int) -> dict[str, Any]:
        """Return the chunk that begins a choice."""
        return self._chunk(number, **self.opening)

    def piece(
        self, number: int, text: str, token_ids: Sequence[int], log_probs: Sequence[float]
    ) -> dict[str, Any]:
        """Return a chunk with a piece of the text, and with newly drawn tokens."""
        parts = self._piece_of_text(text)
        return self._chunk(number, **parts, **self._tokens(token_ids, log_probs))

    def last(self, number: int, reply: Reply) -> list[dict[str, Any]]:
        """Return the chunks that end a choice: its tool calls and its finish reason."""
        chunks = []
        for place, call in enumerate(reply.tool_calls):
            chunks.append(self._chunk(number, delta={"tool_calls": [{"index": place, **call}]}))
        chunks.append(self._chunk(number, **self.ending, finish_reason=reply.finish_reason))
        return chunks

    def usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the chunk with the counts of tokens, the last one of a stream."""
        return {**self.head, "object": self.chunk_kind, "choices": [], "usage": usage(replies)}

    def _chunk(self, number: int, **parts: Any) -> dict[str, Any]:
        choice = {"index": number, "finish_reason": None, "logprobs": None, **parts}
        return {**self.head, "object": self.chunk_kind, "choices": [choice]}

    # ---------------------------------------------------------------- tokens

    def _tokens(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        """Return the log-probs and ids of tokens, as far as the request asks for them."""
        parts: dict[str, Any] = {}
        if self.output.log_probs:
            parts["logprobs"] = self._log_probs(token_ids, log_probs)
        if self.output.token_ids:
            parts["token_ids"] = list(token_ids)
        return parts

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        content = []
        for token_id, log_prob in zip(token_ids, log_probs):
            text = self.wording.token_text(token_id)
            content.append(
                {
                    "token": text,
                    "logprob": float(log_prob),
                    "bytes": list(text.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}


class CompletionFormat(ChatFormat):
    """Replies to /v1/completions."""

    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"
    opening: Mapping[str, Any] = {"text": ""}
    ending: Mapping[str, Any] = {"text": ""}

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        answer = super().whole(replies)
        if answer.pop("prompt_token_ids", None) is not None:
            for choice, reply in zip(answer["choices"], replies):
                choice["prompt_token_ids"] = list(reply.prompt_ids)
        return answer

    def _whole_text(self, reply: Reply) -> dict[str, Any]:
        return {"text": reply.content}

    def _piece_of_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _log_probs(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        texts = [self.wording.token_text(token_id) for token_id in token_ids]
        ends = list(accumulate(map(len, texts), initial=0))
        return {
            "tokens": texts,
            "token_logprobs": [float(log_prob) for log_prob in log_probs],
            "top_logprobs": None,
            "text_offset": ends[:-1],
        }


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Count tokens. The prompt of several choices counts once."""
    prompts = {id(reply.prompt_ids): len(reply.prompt_ids) for reply in replies}
    drawn = sum(len(reply.token_ids) for reply in replies)
    read = sum(prompts.values())
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
