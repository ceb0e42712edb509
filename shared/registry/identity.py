"""What a model directory's KV means: the IdentityKey that every worker of it must share."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ConfigError
from shared.types.identity import IdentityKey


def identity_of(model_dir: Path, name: str, kv_dtype: str, numerics: str) -> IdentityKey:
    """Identity from the directory's contents: config, tokenizer, names and sizes of the weight files.
    Raises ConfigError when there is no readable ``config.json``."""
    try:
        revision = hashlib.sha256((model_dir / "config.json").read_bytes())
        for path in sorted(model_dir.glob("*.safetensors")):
            revision.update(f"{path.name}:{path.stat().st_size};".encode())
        tokenizer = model_dir / "tokenizer.json"
        digest = hashlib.sha256(tokenizer.read_bytes() if tokenizer.exists() else b"")
    except OSError as error:
        raise ConfigError("the model directory has no readable config.json") from error
    return IdentityKey(
        model=name,
        revision=revision.hexdigest()[:32],
        tokenizer=digest.hexdigest()[:32],
        kv_dtype=kv_dtype,
        numerics=numerics,
    )
