"""Which workers are there, which serve a request, and how many requests are let in."""
