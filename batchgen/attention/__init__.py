"""Attention over paged KV, chosen by what the device offers."""
