"""Tools of agents, run in real local sandboxes."""

from __future__ import annotations

import pytest

from k3rl.errors import UserError
from rollout.environments.tools import TOOLS, ToolError, ToolLimits, call_tool, declaration

LIMITS = ToolLimits(bash_s=2.0, python_s=2.0, output_chars=200)


@pytest.fixture(scope="module")
def call(backend, do):
    sandbox = do(backend.create())
    yield lambda name, limits=LIMITS, **arguments: do(call_tool(sandbox, limits, name, arguments))
    do(sandbox.kill())


def test_bash_and_python_share_the_home_folder(call):
    assert call("bash", command="echo 7 > n; pwd") == call("bash", command="echo $HOME")
    assert call("python", code="print(int(open('n').read()) * 6)") == "42"


def test_each_call_starts_a_new_shell_in_the_home_folder(call):
    call("bash", command="cd /tmp; export X=1")
    assert call("bash", command='pwd; echo "[$X]"') == call("bash", command="echo $HOME") + "\n[]"


def test_how_a_command_ended_is_told(call):
    assert call("bash", command="true") == "[no output]"
    assert call("bash", command="echo out; echo err >&2; exit 3").splitlines()[-1] == "[exit code 3]"
    assert "ZeroDivisionError" in call("python", code="1/0")


def test_both_streams_come_in_order(call):
    text = call("bash", command="echo a; sleep 0.1; echo b >&2; sleep 0.1; echo c")
    assert text == "a\nb\nc"


def test_a_command_that_overruns_is_ended_and_its_output_kept(call):
    text = call("bash", command="echo begun; sleep 30")
    assert text == "begun\n[not finished after 2 s]"
    assert call("python", code="while True: pass") == "[not finished after 2 s]"


def test_long_output_keeps_both_ends(call):
    text = call("bash", command="echo first; yes | head -c 1000000; echo last")
    assert (text[:6], text[-4:]) == ("first\n", "last")
    assert "left out" in text
    assert len(text) < 300


def test_files_are_made_shown_and_changed(call):
    assert call("create", path="a/b.txt", content="one\ntwo\nthree\n") == "[written]"
    assert call("view", path="a/b.txt") == "1 one\n2 two\n3 three"
    assert call("view", path="a/b.txt", first=2, last=2) == "2 two"
    assert call("view", path="a") == "b.txt"
    assert call("edit", path="a/b.txt", old="two", new="2") == "[written]"
    assert call("bash", command="cat a/b.txt") == "one\n2\nthree"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("view", {"path": "nothing"}, "nothing"),
        ("edit", {"path": "nothing", "old": "a", "new": "b"}, "nothing"),
        ("view", {"path": "n", "first": 0}, "count from 1"),
        ("create", {"path": "/usr/x", "content": ""}, "usr"),
        ("bash", {}, "needs the argument 'command'"),
        ("bash", {"command": 3}, "must be a string"),
        ("bash", {"comand": "ls"}, "did you mean 'command'"),
        ("bash", {"command": "echo \0"}, "zero byte"),
        ("view", {"path": "/dev/zero"}, "not a file"),
    ],
)
def test_what_cannot_be_done_is_told(call, name, arguments, said):
    with pytest.raises(ToolError, match=said):
        call(name, **arguments)


def test_an_edit_needs_exactly_one_place(call):
    call("create", path="twice", content="x x")
    with pytest.raises(ToolError, match="2 times"):
        call("edit", path="twice", old="x", new="y")
    with pytest.raises(ToolError, match="0 times"):
        call("edit", path="twice", old="", new="y")


def test_large_and_binary_files_are_refused_by_name(call):
    call("bash", command="head -c 5000 /dev/zero > big; printf '\\377\\376' > binary")
    with pytest.raises(ToolError, match="5000 bytes"):
        call("view", path="big", limits=ToolLimits(file_bytes=100))
    with pytest.raises(ToolError, match="not UTF-8"):
        call("view", path="binary")


def test_every_tool_is_declared_with_its_arguments():
    for name in (*TOOLS, "submit"):
        function = declaration(name)["function"]
        assert function["name"] == name
        assert function["description"]
    assert declaration("edit")["function"]["parameters"]["required"] == ["path", "old", "new"]
    with pytest.raises(UserError, match="did you mean 'bash'"):
        declaration("bsh")
