"""Attention over paged KV. `reference` is plain torch and runs everywhere; each fast backend is a file beside it."""
