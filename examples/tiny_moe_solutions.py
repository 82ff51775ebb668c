"""Solutions for the bundled model's training text. In: a task kind, its metadata and answer. Out: a worked or a direct response."""

import ast
import math
from typing import Any

from rollout.demo.tasks import ANSWER_MARK, evaluate

_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def direct(answer: str) -> str:
    """The answer and nothing else."""
    return f"{ANSWER_MARK} {answer}"


def worked(kind: str, metadata: dict[str, Any], answer: str) -> str:
    """Short steps, then the answer. ValueError when the item has no such solution (a countdown with a broken quotient)."""
    return f"{_steps(kind, metadata)} {ANSWER_MARK} {answer}"


def _steps(kind: str, metadata: dict[str, Any]) -> str:
    match kind:
        case "chain_sum" | "basic_arithmetic" | "countdown":
            return ", ".join(arithmetic_steps(metadata["expression"]))
        case "products":
            a, b = map(int, metadata["expression"].split(" * "))
            return ", ".join(product_steps(a, b))
        case "gcd":
            return ", ".join(euclid_steps(*metadata["numbers"]))
        case "lcm":
            a, b = metadata["numbers"]
            common = math.gcd(a, b)
            reduced = a // common
            quotient = f"{a} / {common} = {reduced}"
            return ", ".join([*euclid_steps(a, b), quotient, *product_steps(max(reduced, b), min(reduced, b))])
        case "fraction_simplification":
            top, bottom = metadata["numerator"], metadata["denominator"]
            common = math.gcd(top, bottom)
            quotients = [f"{number} / {common} = {number // common}" for number in (top, bottom)]
            return ", ".join([*euclid_steps(bottom, top), *quotients])
        case "letter_counting":
            count, parts = 0, []
            for word in metadata["span"]:
                count += word.lower().count(metadata["target_letter"])
                parts.append(f"{word} {count}")
            return ", ".join(parts)
        case "spell_backward":
            word = metadata["word"]
            return f"{' '.join(word)}, {' '.join(word[::-1])}"
        case "number_sorting":
            return " ".join(metadata["sorted_numbers"])
    raise ValueError(f"no worked solution for the kind {kind!r}")


def arithmetic_steps(expression: str) -> list[str]:
    """One equation for every operation, in evaluation order."""
    steps: list[str] = []

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            left, right = walk(node.left), walk(node.right)
            step = f"{left} {_SYMBOLS[type(node.op)]} {right}"
            value = evaluate(step)
            steps.append(f"{step} = {value}")
            return value
        return evaluate(ast.unparse(node))

    walk(ast.parse(expression, mode="eval").body)
    return steps


def product_steps(a: int, b: int) -> list[str]:
    """a times each digit of b, then the sums; one equation when either has a single non-zero digit's worth of work."""
    parts = [int(digit) * 10**power for power, digit in zip(range(len(str(b)) - 1, -1, -1), str(b), strict=True) if digit != "0"]
    if a < 10 or len(parts) < 2:
        return [f"{a} * {b} = {a * b}"]
    steps = [f"{a} * {part} = {a * part}" for part in parts]
    total = a * parts[0]
    for part in parts[1:]:
        steps.append(f"{total} + {a * part} = {total + a * part}")
        total += a * part
    return steps


def euclid_steps(a: int, b: int) -> list[str]:
    """Remainders down to zero; the last divisor is the greatest common one."""
    steps = []
    while b:
        steps.append(f"{a} % {b} = {a % b}")
        a, b = b, a % b
    return steps
