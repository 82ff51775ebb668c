"""Typed access to config.json. In: the parsed json. Out: values of the kind that is asked for, or an error that names the field.
Knows no family.
"""

from typing import Any

from batchgen.errors import ModelError

MAX_COUNT = 1 << 12
"""Most layers, heads, experts and the like."""
MAX_SIZE = 1 << 20
"""Widest layer. Together these keep every product of sizes within 64 bits, so that a tensor of the files can contradict it."""
MAX_TABLE = 1 << 24
"""Largest vocabulary, and longest context."""
MAX_NUMBER = 1e30
"""Within float32."""


class ConfigReader:
    """Fields by name; several names because transformers renamed keys. Null is absent; without a default a field must be there."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def has(self, *names: str) -> bool:
        """Whether one of them is present."""
        return self._find(names)[1] is not None

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The first name that is present, with its value."""
        return next(((name, self.values[name]) for name in names if self.values.get(name) is not None), (names[0], None))

    def get(self, *names: str, default: Any = None) -> Any:
        """The value as it is."""
        value = self._find(names)[1]
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {' or '.join(names)}; the folder is not a complete Hugging Face checkpoint")
        return value

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """Within `least`..`most`."""
        value = self.get(*names, default=default)
        if type(value) is not int or not least <= value <= most:
            kind = {0: "an integer of at least 0", 1: "a positive integer"}[least]
            raise self.error(names, f"{kind} of at most {most}")
        return value

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A number of parts, each of which takes memory and time before any tensor is seen."""
        return self.integer(*names, default=default, least=least, most=MAX_COUNT)

    def number(self, *names: str, default: float | None = None, above: float = 0.0, below: float = MAX_NUMBER) -> float:
        """Between these; integers too."""
        value = self.get(*names, default=default)
        if type(value) not in (int, float) or not above < value < below:
            raise self.error(names, f"a number between {above:g} and {below:g}")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(*names, default=default)
        if type(value) is not bool:
            raise self.error(names, "true or false")
        return value

    def integers(self, *names: str, default: list[int] | None = None) -> list[int]:
        """A list of integers, or a single one."""
        value = self.get(*names, default=default)
        values = value if isinstance(value, list) else [value]
        if any(type(each) is not int for each in values):
            raise self.error(names, "an integer or a list of them")
        return values

    def error(self, names: tuple[str, ...], wanted: str) -> ModelError:
        """What the field should be, and what it is."""
        name, value = self._find(names)
        return ModelError(f"config.json: {name} is {wanted}, got {value!r:.200}")

    def refuse(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Raise when the key asks for something that this family does not compute."""
        value = self.values.get(name)
        if value not in (None, *allowed):
            raise ModelError(f"config.json: {name} is {value!r:.200}; supported: {', '.join(map(repr, allowed))}")

    def nested(self, name: str) -> "ConfigReader":
        """The object under `name`, with what it lacks taken from this one."""
        inner = self.get(name)
        if not isinstance(inner, dict):
            raise self.error((name,), "an object")
        return ConfigReader({key: value for key, value in self.values.items() if key != name} | inner)

    @property
    def num_layers(self) -> int:
        """Positive."""
        return self.count("num_hidden_layers")

    def per_layer(self, name: str, known: tuple[str, ...]) -> list[str] | None:
        """A list with one of the known words for each layer; None if it is absent."""
        words = self.values.get(name)
        if words is None:
            return None
        if not isinstance(words, list) or len(words) < self.num_layers or any(word not in known for word in words):
            raise ModelError(f"config.json: {name} holds {', '.join(known)} for each of {self.num_layers} layers, got {words!r:.200}")
        return words[: self.num_layers]

    def refuse_short_window(self) -> None:
        """ModelError if attention is limited to a window shorter than the context."""
        if self.values.get("sliding_window") in (None, 0):
            return
        window, longest = self.integer("sliding_window", most=MAX_TABLE), self.context
        if window < longest:
            raise ModelError(
                f"config.json: sliding_window is {window}, shorter than the context of {longest}; only whole contexts are attended to"
            )

    @property
    def context(self) -> int:
        """Longest sequence."""
        return self.integer("max_position_embeddings", "model_max_length", most=MAX_TABLE)
