"""Markers in growing text. In: text that may end inside a marker. Out: the first marker, or how much of the end must wait."""

import re


class Markers:
    """A set of strings, none the beginning of another: so that what is found does not depend on how the text arrives."""

    def __init__(self, markers: frozenset[str]):
        assert not any(a != b and b.startswith(a) for a in markers for b in markers), markers
        self._pattern = re.compile("|".join(re.escape(marker) for marker in sorted(markers)) or r"(?!)")
        self._beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker at or after `start`."""
        return self._pattern.search(text, start)

    def num_held(self, text: str, start: int) -> int:
        """Trailing characters of a text without markers that could still become one."""
        for length in range(min(self._longest, len(text) - start), 0, -1):
            if text[len(text) - length :] in self._beginnings:
                return length
        return 0
