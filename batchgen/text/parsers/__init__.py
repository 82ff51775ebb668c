"""What models write besides their answer: reasoning and tool calls, as text with markers."""
