"""transformers as a process: one JSON line in, one JSON line out. ``tests.bench.peer`` starts it.

A call names threads and attention; "one" runs ``generate`` on one prompt with a streamer, "batch" a static
batch in the leanest loop that the library's own forward pass allows. Float32, greedy, no end of sequence.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging


class _Times(BaseStreamer):
    """When each token came; the prompt is put first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Any) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        pass


class _Model:
    def __init__(self, model_dir: str) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def prepare(self, threads: int, attention: str) -> None:
        torch.set_num_threads(threads)
        if self._model.config._attn_implementation != attention:
            self._model.set_attn_implementation(attention)

    @torch.inference_mode()
    def one(self, token_ids: list[int], num_tokens: int) -> dict[str, Any]:
        times, ids = _Times(), torch.tensor([token_ids])
        began = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=times,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        arrivals = [at - began for at in times.seconds[1:]]
        return {"arrivals": arrivals, "token_ids": out[0, len(token_ids) :].tolist()}

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        last = out.logits[:, -1:].argmax(-1)
        rows = [last]
        for _ in range(num_tokens - 1):
            out = self._model(last, cache=out.past_key_values, use_cache=True)
            last = out.logits[:, -1:].argmax(-1)
            rows.append(last)
        token_ids = torch.cat(rows, 1).tolist()
        return {"seconds": time.perf_counter() - began, "token_ids": token_ids}


def main() -> None:
    model = _Model(sys.argv[1])
    print("{}", flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        model.prepare(call["threads"], call["attention"])
        act = model.one if call["act"] == "one" else model.batch
        print(json.dumps(act(call["prompt"], call["num_tokens"])), flush=True)


if __name__ == "__main__":
    main()
