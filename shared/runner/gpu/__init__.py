"""The runner of a GPU: rows and inputs that live there, steps that are launched and not waited for."""
