"""The tasks are reasoning-gym's: either side scores the other's items alike. Questions repeat from their seed and never within a set."""

from random import Random
from types import ModuleType

import pytest

from rollout.demo.tasks import DIFFICULTY, KINDS, TaskItem, evaluate, extract_answer, is_correct, make_items, score_response


@pytest.fixture(scope="module")
def gym() -> ModuleType:
    return pytest.importorskip("reasoning_gym")


def attempts(item: TaskItem, others: list[TaskItem], rng: Random) -> list[str]:
    """The right answer, near misses, other items' answers and rubbish."""
    answer = item.answer
    place = rng.randrange(len(answer))
    cut = answer[:place] + answer[place + 1 :]
    changed = answer[:place] + rng.choice("0123456789xz-/") + answer[place + 1 :]
    return [answer, cut, changed, answer + "0", "-" + answer, answer.upper(), "no idea", "1/0", "[]", *(other.answer for other in others)]


def entry(item: TaskItem) -> dict:
    return {"question": item.question, "answer": item.answer, "metadata": item.metadata}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_our_items_equal_reasoning_gyms(gym: ModuleType, kind: str) -> None:
    theirs = gym.create_dataset(kind, seed=0, size=1, **DIFFICULTY[kind])
    items = make_items(25, 7, (kind,))
    rng = Random(0)
    for item in items:
        assert theirs.score_answer(item.answer, entry(item)) == 1.0
        for attempt in attempts(item, items[:3], rng):
            assert is_correct(item, attempt) == (theirs.score_answer(attempt, entry(item)) == 1.0), (item, attempt)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_reasoning_gyms_items_equal_its_own(gym: ModuleType, kind: str) -> None:
    theirs = gym.create_dataset(kind, seed=3, size=12, **DIFFICULTY[kind])
    items = [TaskItem(kind, one["question"], one["answer"], one["metadata"]) for one in theirs]
    rng = Random(1)
    for item in items:
        assert score_response(item, f"some steps #### {item.answer}") == 1.0
        for attempt in attempts(item, items[:3], rng):
            assert is_correct(item, attempt) == (theirs.score_answer(attempt, entry(item)) == 1.0), (item, attempt)


def test_equal_seeds_make_equal_items_and_a_set_has_no_question_twice() -> None:
    items = make_items(160, 5, KINDS)
    assert items == make_items(160, 5, KINDS) != make_items(160, 6, KINDS)
    assert len({item.question for item in items}) == 160
    assert [item.kind for item in items[:10]] == list(KINDS)


@pytest.mark.parametrize(
    ("response", "answer"),
    [("#### 7", "7"), ("3 + 4 = 7 #### 7 ", "7"), ("#### 1 #### 2", "2"), ("7", None), ("####", None), ("####  ", None), ("", None)],
)
def test_the_answer_is_what_stands_behind_the_last_mark(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer
    assert answer is not None or score_response(make_items(1, 0)[0], response) == 0.0


@pytest.mark.parametrize("expression", ["__import__('os')", "2 ** 9", "1 / 0", "7 / 2", "1 +", "(" * 150, "1" * 300, "a", "1.5", "True"])
def test_expressions_that_are_no_whole_number_arithmetic_are_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expected|whole number|at most"):
        evaluate(expression)
