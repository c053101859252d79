"""Exercise files as learners would hand them in, for the tests of the exercises."""

import re
import textwrap

from minidist.learn import strip
from minidist.learn.attempt import Code
from minidist.learn.grade import solution


def untouched(number: str) -> Code:
    ours = solution(number)
    return Code(ours.file, strip.strip(ours.text))


def filled(*numbers: str, **bodies: str) -> str:
    """An exercise file in which the holes of `numbers` hold our solution, and others a given body:
    filled(_2_1="pass")."""
    own = {name.strip("_").replace("_", "."): body for name, body in bodies.items()}
    ours = solution([*numbers, *own][0])
    kept = [re.escape(n) for n in numbers] or ["nothing"]
    text = re.sub(rf"# (BEGIN SOLUTION (?:{'|'.join(kept)})\n)", r"# kept \1", ours.text)
    for number, body in own.items():
        hole = rf"^( *)# BEGIN SOLUTION {re.escape(number)}\n.*?# END SOLUTION\n"

        def body_there(match, body=body):
            return textwrap.indent(textwrap.dedent(body).strip("\n"), match[1]) + "\n"

        text = re.sub(hole, body_there, text, flags=re.DOTALL | re.MULTILINE)
    lines, inside = [], False
    for line in text.splitlines():  # the END lines of holes that were kept
        inside = inside or "# BEGIN SOLUTION" in line and "# kept" not in line
        if "# END SOLUTION" in line and not inside:
            continue
        inside = inside and "# END SOLUTION" not in line
        lines.append(line)
    return strip.strip("\n".join(lines))
