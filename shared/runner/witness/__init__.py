"""The witness runners: digests in place of a model; the definition is in ``shared.runner.witness_config``."""

from shared.runner.witness.encoder import WitnessEncoderRunner
from shared.runner.witness.runner import WitnessRunner

__all__ = ["WitnessEncoderRunner", "WitnessRunner"]
