"""gRPC between the services: servers, clients, the worker stream, wire <-> types; owns all wire code."""

import os

# gRPC's core writes lines of its own to stderr, where ours are structured; read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
