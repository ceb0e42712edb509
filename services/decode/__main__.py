"""The decode worker's process: configuration in, engine out."""

from __future__ import annotations

import sys

from shared.engine.main import main

if __name__ == "__main__":
    sys.exit(main("decode", sys.argv[1:]))
