"""The claims of the documents: measured now, judged by the numbers and by nothing else."""

import json

import pytest

from minidist import cli
from minidist.comm.launch import RankFailure
from minidist.learn import claims

# What the literature says about each (shared facts: "half right" is imprecise here, and what is
# right with a remark is right).
FACTS = {
    "a": "right", "b": "imprecise", "c": "wrong", "d": "imprecise", "e": "wrong", "f": "imprecise",
    "g": "right", "h": "imprecise", "i": "imprecise", "j": "wrong", "k": "right", "l": "wrong",
    "m": "right", "n": "imprecise",
}  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> dict[str, claims.Checked]:
    return {found.claim.id: found for found in claims.check_all()}


@pytest.mark.timeout(400)
def test_verdicts_are_those_of_the_literature(measured):
    assert {name: found.verdict for name, found in measured.items()} == FACTS


# If the measurement had come out like this, the verdict would be that.
PLANTED = [
    ("a", {"sent_8": 1.3}, "wrong"),
    ("a", {"accumulated_4": 3.0}, "imprecise"),
    ("b", {"saving_1_1024": 2.0}, "wrong"),
    ("b", {"saving_1_8": 3.9, "saving_2_8": 7.9, "traffic_3": 2.5}, "right"),
    ("c", {"grad_op_8": 0.125, "grad_op_64": 0.0157, "full_8": 0.125, "full_64": 0.0157}, "right"),
    ("d", {"tp_many": 1000.0}, "wrong"),
    ("d", {"tp_few": 1e6, "pp_many": 1e6}, "right"),
    ("e", {"row_width": 0.25, "row_slice_error": 1e-7, "gathers": 2}, "right"),
    ("f", {"many_layers": 0.1}, "right"),
    ("f", {"many_microbatches": 0.7}, "wrong"),
    ("g", {"early_prefetch": 0.0}, "wrong"),
    ("g", {"descending": 0.0}, "imprecise"),
    ("h", {"host_optimizer": 0.0}, "wrong"),
    ("h", {"device_parameters": 0, "device_activations": 0, "host_gradients": 0}, "right"),
    ("i", {"shard_grad_op": 1.5}, "wrong"),
    ("i", {"hybrid_shard": 2.0, "hybrid_64": 2.5}, "right"),
    ("j", {"offload 8B on 8 H100": 1, "offload 13B on 8 A100": 1, "offload 70B on 256 H100": 1},
     "right"),
    ("k", {"bubble_tp": 0.2}, "wrong"),
    ("k", {"uneven": 0.5}, "wrong"),
    ("l", {"kept_gradients": 1.0}, "right"),
    ("m", {"bubble_1f1b": 0.1}, "imprecise"),
    ("m", {"bytes_1f1b": 1e9}, "wrong"),
    ("n", {"exponent_adam": 1.0}, "right"),
    ("n", {"exponent_sgd": 0.5}, "wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "verdict"), PLANTED)
def test_other_numbers_give_another_verdict(measured, name, changes, verdict):
    numbers = measured[name].numbers
    assert changes.keys() <= numbers.keys()
    assert claims.get(name).judge({**numbers, **changes}).verdict == verdict
    assert verdict != measured[name].verdict


def test_every_claim_is_complete_in_both_languages(measured):
    for found in measured.values():
        row = found.row()
        for key in ("title", "statement", "short", "measured", "why"):
            english, chinese = row[key], row[f"{key}_zh"]
            assert english.isascii() and not chinese.isascii(), (found.claim.id, key)
            # A figure that is in one language is in the other as well.
            if key in ("short", "measured"):
                assert any(c.isdigit() for c in english) and any(c.isdigit() for c in chinese)
        blocks = found.markdown()
        assert blocks.count('<div lang="zh">') == blocks.count('<div lang="en">') == 1


def test_what_the_notebook_shows(monkeypatch, measured):
    shown = []
    monkeypatch.setattr(claims, "check", measured.__getitem__)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    claims.show("m")
    assert "**结论：正确**" in shown[0]["text/markdown"]
    assert "verdict: right." in shown[0]["text/plain"]


def test_the_command_prints_one_line_per_claim_and_writes_json(
    monkeypatch, measured, capsys, tmp_path
):
    monkeypatch.setattr(claims, "check", measured.__getitem__)
    file = tmp_path / "claims.json"
    assert cli.main(["claims", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert [line[0] for line in lines[1:]] == sorted(FACTS)
    for line, (name, verdict) in zip(lines[1:], FACTS.items(), strict=True):
        assert line.endswith(f" {verdict}") and claims.get(name).section in line
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    keys = {"claim", "section", "statement", "measured", "verdict", "why"}
    assert all(keys <= row.keys() for row in rows)
    assert {row["claim"]: row["verdict"] for row in rows} == FACTS


def test_languages_and_choice(monkeypatch, measured, capsys):
    monkeypatch.setattr(claims, "check", measured.__getitem__)
    assert cli.main(["claims", "--only", "m,c", "--zh", "--why"]) == 0
    out = capsys.readouterr().out
    assert "错误" in out and "正确" in out and out.index("错误") < out.index("正确")
    assert cli.main(["claims", "--only", "x"]) == 2
    assert "there is no claim 'x'; choose from a, b," in capsys.readouterr().err


def test_a_claim_that_cannot_be_measured_is_not_judged(monkeypatch, capsys):
    def broken(name):
        raise RankFailure("rank 1 died\nlong story", 1, "", {})

    monkeypatch.setattr(claims, "check", broken)
    assert cli.main(["claims", "--only", "a"]) == 1
    assert "rank 1 died" in capsys.readouterr().out
