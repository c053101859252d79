"""``pytest exercises``: the same checks as ``minidist check``, one test per exercise.

每道题一个测试，失败时显示的就是 ``minidist check`` 的信息。这个文件不用改。
Failures show what ``minidist check`` says. Nothing needs to be changed here.
"""

from pathlib import Path

import pytest

from minidist.learn import strip
from minidist.learn.exercise_commands import check_one
from minidist.learn.grade import PASSED, Grader

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


@pytest.mark.parametrize("number", list(strip.all_tasks()))
def test_exercise(grader, number):
    verdict = check_one(grader, HERE, strip.all_tasks()[number])
    if verdict.status != PASSED:
        text = f"{number} [{verdict.status}]\n{verdict.zh}\n{verdict.en}\n"
        pytest.fail(text + "\n".join([*verdict.facts, *verdict.printed]), pytrace=False)
