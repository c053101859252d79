"""`minidist doctor`: its lines, its self-test, and that it finds what is wrong."""

import json

from minidist.cli import main
from minidist.comm import doctor


def test_examination_and_self_test(capsys, tmp_path):
    path = tmp_path / "machine.json"
    assert main(["doctor", "--ranks", "2", "--json", str(path)]) == 0
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    assert {"python", "torch", "cores", "loopback", "start 2 ranks"} <= set(rows)
    assert float(rows["difference from one process"]["value"]) < 1e-12
    assert "cores" in capsys.readouterr().out


def test_what_is_wrong_is_a_problem_with_advice(monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_wire")
    assert main(["doctor", "--ranks", "0"]) == 1
    assert "no such" in capsys.readouterr().out
    assert doctor._at_least((2, 4), (2, 6)) == ("problem", "needs 2.6 or newer")


def test_a_wrong_result_is_found(monkeypatch):
    monkeypatch.setattr(doctor, "_small_training", lambda: 1e-3)
    line = doctor.self_test(1)[-1]
    assert line.judgement == "problem" and line.value == "1.0e-03"


def test_wrong_arguments(capsys):
    assert main(["doctor", "--ranks", "-1"]) == 2
    assert "ranks must be 0 or more" in capsys.readouterr().err
