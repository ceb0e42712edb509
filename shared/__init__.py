"""The core that services share; each sub-package says in one sentence what it owns."""
