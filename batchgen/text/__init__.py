"""Text at the edge: strings and chat messages in, token ids out, and back. Never imports torch."""
