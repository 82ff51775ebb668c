"""Verifiable tasks. In: a kind and a seeded generator. Out: questions, answers, exact scores, as reasoning-gym's. Never imports torch.

The question wording, the metadata keys and the scoring follow the generators of the same names in reasoning-gym 0.1.25 (Apache-2.0), so
items of either side can be scored by the other; tests compare them.
"""

import ast
import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from random import Random
from typing import Any

from rollout.demo.words import WORDS

ANSWER_MARK = "####"
"""What stands before the final answer in a response."""

DIFFICULTY: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 4, "max_terms": 5, "min_digits": 2, "max_digits": 3},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3},
    "basic_arithmetic": {
        "min_terms": 5,
        "max_terms": 6,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ("+", "-", "*"),
        "allow_negation": False,
    },
    "gcd": {"min_value": 1, "max_value": 500},
    "lcm": {"min_value": 1, "max_value": 200},
    "fraction_simplification": {"min_value": 1, "max_value": 100, "min_factor": 2, "max_factor": 40, "styles": ("plain",)},
    "letter_counting": {"min_words": 4, "max_words": 7},
    "spell_backward": {"min_word_len": 5, "max_word_len": 9},
    "number_sorting": {"min_numbers": 3, "max_numbers": 6, "min_decimals": 0, "max_decimals": 0},
    "countdown": {"min_numbers": 4, "max_numbers": 4, "min_value": 1, "max_value": 20, "min_target": 10, "max_target": 99},
}
"""Task kind → the reasoning-gym configuration the bundled model was trained with, which is also what `make_item` draws from."""

KINDS = tuple(DIFFICULTY)
SHORT_KINDS = KINDS[:8]
"""Kinds whose questions are a line long: the mixture of `rollout demo`."""


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One question with what its scorer needs."""

    kind: str
    question: str
    answer: str
    """The answer in the form the scorer takes; for countdown one of several."""
    metadata: dict[str, Any] = field(default_factory=dict)


def make_item(kind: str, rng: Random) -> TaskItem:
    """Draw one item of `kind` (KeyError: not in KINDS); equal generator states give equal items."""
    question, answer, metadata = _MAKERS[kind](rng, **DIFFICULTY[kind])
    return TaskItem(kind, question, answer, metadata)


def make_items(num_items: int, seed: int, kinds: tuple[str, ...] = SHORT_KINDS) -> list[TaskItem]:
    """`num_items` different items, the kinds in turn."""
    rng = Random(seed)
    items: list[TaskItem] = []
    seen: set[str] = set()
    while len(items) < num_items:
        item = make_item(kinds[len(items) % len(kinds)], rng)
        if item.question not in seen:
            seen.add(item.question)
            items.append(item)
    return items


def extract_answer(response: str) -> str | None:
    """The text after the last answer mark, or None when there is none."""
    _, mark, answer = response.rpartition(ANSWER_MARK)
    return (answer.strip() or None) if mark else None


def score_response(item: TaskItem, response: str) -> float:
    """1.0 when the response's marked answer is right, else 0.0."""
    answer = extract_answer(response)
    return float(answer is not None and is_correct(item, answer))


def is_correct(item: TaskItem, answer: str) -> bool:
    """Whether reasoning-gym's `score_answer` gives this bare answer its full mark."""
    return _CHECKERS[item.kind](answer, item)


def _chain_sum(rng: Random, min_terms: int, max_terms: int, min_digits: int, max_digits: int) -> tuple[str, str, dict[str, Any]]:
    digits, terms = rng.randint(min_digits, max_digits), rng.randint(min_terms, max_terms)
    low = 0 if digits == 1 else 10 ** (digits - 1)
    numbers = [rng.randint(low, 10**digits - 1) for _ in range(terms)]
    expression, total = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        sign = rng.choice((1, -1))
        expression += f" {'+' if sign > 0 else '-'} {number}"
        total += sign * number
    return f"State the final answer to the following arithmetic problem: {expression} =", str(total), {"expression": expression}


def _products(rng: Random, min_terms: int, max_terms: int, min_digits: int, max_digits: int) -> tuple[str, str, dict[str, Any]]:
    digits, terms = rng.randint(min_digits, max_digits), rng.randint(min_terms, max_terms)
    low = 0 if digits == 1 else 10 ** (digits - 1)
    numbers = [rng.randint(low, 10**digits - 1) for _ in range(terms)]
    expression = " * ".join(map(str, numbers))
    question = f"Solve the following multiplication: {expression}. Give only the result as your final answer."
    return question, str(math.prod(numbers)), {"expression": expression}


def _basic_arithmetic(
    rng: Random, min_terms: int, max_terms: int, min_digits: int, max_digits: int, operators: tuple[str, ...], allow_negation: bool
) -> tuple[str, str, dict[str, Any]]:
    bound = 10 ** rng.randint(min_digits, max_digits) - 1

    def terms(count: int) -> str:
        left = rng.randint(1, count)
        numbers = [str(rng.randint(-bound, bound)) for _ in range(left)]
        if left > 1 and rng.random() < 0.5:
            part = f"{'-' if allow_negation and rng.random() < 0.5 else ''}( {terms(left)} )"
        else:
            part = numbers[0] + "".join(f" {rng.choice(operators)} {number}" for number in numbers[1:])
        return part if left == count else f"{part} {rng.choice(operators)} {terms(count - left)}"

    expression = terms(rng.randint(min_terms, max_terms))
    return f"Calculate {expression}.", str(evaluate(expression)), {"expression": expression}


def _two_numbers(rng: Random, low: int, high: int) -> list[int]:
    """Like reasoning-gym: up to three draws until the two share a factor."""
    numbers = [rng.randint(low, high) for _ in range(2)]
    for _ in range(2):
        if math.gcd(*numbers) > 1:
            break
        numbers = [rng.randint(low, high) for _ in range(2)]
    return numbers


def _gcd(rng: Random, min_value: int, max_value: int) -> tuple[str, str, dict[str, Any]]:
    a, b = _two_numbers(rng, min_value, max_value)
    question = f"Find the Greatest Common Divisor (GCD) of these numbers: {a}, {b}. Give only the GCD as your final answer."
    return question, str(math.gcd(a, b)), {"numbers": [a, b]}


def _lcm(rng: Random, min_value: int, max_value: int) -> tuple[str, str, dict[str, Any]]:
    a, b = _two_numbers(rng, min_value, max_value)
    return f"Find the Least Common Multiple (LCM) of these numbers: {a}, {b}", str(math.lcm(a, b)), {"numbers": [a, b]}


def _fraction(
    rng: Random, min_value: int, max_value: int, min_factor: int, max_factor: int, styles: tuple[str, ...]
) -> tuple[str, str, dict[str, Any]]:
    assert styles == ("plain",)
    low, high = sorted(rng.randint(min_value, max_value) for _ in range(2))
    common, factor = math.gcd(low, high), rng.randint(min_factor, max_factor)
    top, bottom = low // common, high // common
    metadata = {
        "numerator": top * factor,
        "denominator": bottom * factor,
        "simplified_numerator": top,
        "simplified_denominator": bottom,
    }
    fraction = f"{top * factor}/{bottom * factor}"
    question = f"Simplify the fraction {fraction} to its lowest terms. Give only the simplified fraction as your final answer."
    return question, f"{top}/{bottom}", metadata


def _letter_counting(rng: Random, min_words: int, max_words: int) -> tuple[str, str, dict[str, Any]]:
    span = rng.choices(WORDS, k=rng.randint(min_words, max_words))
    text = " ".join(span)
    letter = rng.choice(sorted(set("".join(span))))
    question = f'How many times does the letter "{letter}" appear in the text: "{text}"?'
    return question, str(text.count(letter)), {"target_letter": letter, "span": span}


def _spell_backward(rng: Random, min_word_len: int, max_word_len: int) -> tuple[str, str, dict[str, Any]]:
    word = rng.choice([word for word in WORDS if min_word_len <= len(word) <= max_word_len])
    return f"Spell this word backward (example: sun -> nus): {word}", word[::-1], {"word": word}


def _number_sorting(
    rng: Random, min_numbers: int, max_numbers: int, min_decimals: int, max_decimals: int
) -> tuple[str, str, dict[str, Any]]:
    numbers = [round(rng.uniform(-100, 100), rng.randint(min_decimals, max_decimals)) for _ in range(rng.randint(min_numbers, max_numbers))]
    direction = rng.choice(("ascending", "descending"))
    ordered = [str(number) for number in sorted(numbers, reverse=direction == "descending")]
    question = (
        f"Sort these numbers in {direction} order: {', '.join(map(str, numbers))}\n"
        "Please follow the instruction below:\n"
        "## 1. Let all your answers be a list of numbers. Instead of reporting your answer as -69, -13, 1, 7, 11, 43, 59, 61, "
        "use ['-69', '-13', '1', '7', '11', '43', '59', '61'] instead\n"
        "## 2. Convert all numbers in the square brackets as strings. For example, ['-69', '-13', '1', '7', '11', '43', '59', '61']\n"
    )
    return question, str(ordered), {"original_numbers": list(map(str, numbers)), "direction": direction, "sorted_numbers": ordered}


def _countdown(
    rng: Random, min_numbers: int, max_numbers: int, min_value: int, max_value: int, min_target: int, max_target: int
) -> tuple[str, str, dict[str, Any]]:
    while True:
        numbers = [rng.randint(min_value, max_value) for _ in range(rng.randint(min_numbers, max_numbers))]
        expression = str(numbers[0])
        for number in numbers[1:]:
            symbol = rng.choice("+-*/")
            if symbol in "*/" and not expression.isdigit():
                expression = f"({expression})"
            expression += f"{symbol}{number}" if symbol in "*/" else f" {symbol} {number}"
        try:
            target = evaluate(expression)
        except ValueError:
            continue
        if min_target <= target <= max_target:
            break
    rng.shuffle(numbers)
    listed = ", ".join(map(str, numbers))
    ask = rng.choice(
        (
            f"Using all the numbers {listed}, create an expression that equals {target}.\nYou can only use each number once.",
            f"Find a way to make {target} using all of these numbers: {listed}.\nEach number can only be used once.",
            f"Calculate {target} using all of these numbers: {listed}.\nEach number may be used at most once.",
        )
    )
    question = (
        f"{ask}\n\nFinal answer format instructions:\n1. Provide your solution as a arithmetic expression (no '=' sign).\n"
        "2. Do not include the target number in the expression.\n3. Use '*' for multiplication.\n4. Use '/' for division.\n"
        "5. Do not include any other text or formatting.\n"
    )
    return question, expression, {"numbers": numbers, "target": target, "expression": expression}


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(expression: str) -> int:
    """Value of an integer expression of + - * / and brackets; ValueError when it is none, or a quotient is not whole."""
    if len(expression) > 200:
        raise ValueError(f"an expression has at most 200 characters, got {len(expression)}")

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool) and abs(number) < 10**9:
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                top, bottom = value(left), value(right)
                if bottom == 0 or top % bottom:
                    raise ValueError(f"{top} / {bottom} is not a whole number")
                return top // bottom
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
        raise ValueError(f"expected whole numbers with + - * / and brackets, got {expression!r}")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"expected an arithmetic expression, got {expression!r}") from None


def _equal_number(answer: str, item: TaskItem) -> bool:
    try:
        return Decimal(answer.replace(",", "")) == Decimal(item.answer)
    except InvalidOperation:
        return False


def _equal_text(answer: str, item: TaskItem) -> bool:
    return answer == item.answer


def _equal_letters(answer: str, item: TaskItem) -> bool:
    return answer.lower() == item.answer.lower()


def _equal_fraction(answer: str, item: TaskItem) -> bool:
    top, _, bottom = answer.strip().strip("$").partition("/")
    try:
        return (int(top), int(bottom)) == (item.metadata["simplified_numerator"], item.metadata["simplified_denominator"])
    except ValueError:
        return False


def _sorted_list(answer: str, item: TaskItem) -> bool:
    try:
        numbers = [float(number) for number in json.loads(answer.replace("'", '"'))]
    except (ValueError, TypeError):
        return False
    expected = [float(number) for number in item.metadata["sorted_numbers"]]
    in_order = numbers == sorted(numbers, reverse=item.metadata["direction"] == "descending")
    return in_order and len(numbers) == len(expected) and all(abs(a - b) <= 1 for a, b in zip(numbers, expected, strict=True))


def _makes_target(answer: str, item: TaskItem) -> bool:
    digits = "".join(char if char.isdigit() else " " for char in answer).split()
    try:
        return sorted(map(int, digits)) == sorted(item.metadata["numbers"]) and evaluate(answer) == item.metadata["target"]
    except ValueError:
        return False


_MAKERS: dict[str, Callable[..., tuple[str, str, dict[str, Any]]]] = {
    "chain_sum": _chain_sum,
    "products": _products,
    "basic_arithmetic": _basic_arithmetic,
    "gcd": _gcd,
    "lcm": _lcm,
    "fraction_simplification": _fraction,
    "letter_counting": _letter_counting,
    "spell_backward": _spell_backward,
    "number_sorting": _number_sorting,
    "countdown": _countdown,
}

_CHECKERS: dict[str, Callable[[str, TaskItem], bool]] = {
    "chain_sum": _equal_number,
    "products": _equal_number,
    "basic_arithmetic": _equal_text,
    "gcd": _equal_text,
    "lcm": _equal_text,
    "fraction_simplification": _equal_fraction,
    "letter_counting": _equal_text,
    "spell_backward": _equal_letters,
    "number_sorting": _sorted_list,
    "countdown": _makes_target,
}
