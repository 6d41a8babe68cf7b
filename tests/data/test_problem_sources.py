"""Problems from every kind of source, and what each kind of bad input says."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from k3rl.data import DataConfig, every_effort, load_conversations, load_problems
from k3rl.errors import UserError
from k3rl.types import Effort

ADAPTER = TypeAdapter(DataConfig)


def load(**config):
    return load_problems(ADAPTER.validate_python(config))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


ROWS = [
    {"id": "a", "prompt": "1+1?", "answer": "2", "budget_tokens": 40, "level": 3},
    {
        "id": "b",
        "messages": [{"role": "user", "content": "hé?"}],
        "answer": "x",
        "effort": "low",
        "domain": "agent",
    },
    {"id": "c", "prompt": "2+2?", "reward": {"name": "exact", "answer": "4"}, "tools": [{"name": "t"}]},
]


def check_rows(source):
    a, b, c = source[0], source[1], source[2]
    assert len(source) == 3
    assert a.messages == [{"role": "user", "content": "1+1?"}]
    assert a.reward == {"name": "math", "answer": "2"}
    assert (a.domain, a.effort, a.budget_tokens) == ("general", None, 40)
    assert b.messages == [{"role": "user", "content": "hé?"}]
    assert (b.domain, b.effort, b.tools) == ("agent", Effort.LOW, [])
    assert c.reward == {"name": "exact", "answer": "4"}
    assert c.tools == [{"name": "t"}]


def test_jsonl_rows_become_problems_in_any_order_of_access(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", ROWS)
    with open(path, "a") as file:
        file.write("\n\n")
    source = load(type="jsonl", path=path, reward="math")
    assert source[2].id == "c"
    check_rows(source)


def test_parquet_and_datasets_give_the_same_problems_as_jsonl(tmp_path):
    import datasets

    rows = [{k: json.dumps(v) if k in ("reward", "tools") else v for k, v in row.items()} for row in ROWS]
    table = pa.Table.from_pylist(
        rows,
        schema=pa.schema(
            [
                ("id", pa.string()),
                ("prompt", pa.string()),
                ("answer", pa.string()),
                ("budget_tokens", pa.int64()),
                ("level", pa.int64()),
                ("effort", pa.string()),
                ("domain", pa.string()),
                ("reward", pa.string()),
                ("tools", pa.string()),
                (
                    "messages",
                    pa.list_(
                        pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
                    ),
                ),
            ]
        ),
    )
    pq.write_table(table, tmp_path / "p.parquet")
    check_rows(load(type="parquet", path=str(tmp_path / "p.parquet"), reward="math"))
    pq.write_table(table.slice(0, 2), tmp_path / "q-0.parquet")
    pq.write_table(table.slice(2, 1), tmp_path / "q-1.parquet")
    split = load(type="parquet", path=str(tmp_path / "q-*.parquet"), reward="math")
    check_rows(split)
    assert split.rows.where(2).endswith("q-1.parquet row 0")
    datasets.Dataset(table).save_to_disk(str(tmp_path / "d"))
    check_rows(load(type="datasets", path=str(tmp_path / "d"), reward="math"))


def test_column_mapping_and_metadata(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"question": "q", "solution": 7, "level": 3}])
    columns = {"prompt": "question", "answer": "solution", "metadata": ["level"]}
    problem = load(
        type="jsonl", path=path, reward={"name": "math", "strict": True}, system="Be brief.", columns=columns
    )[0]
    assert problem.reward == {"name": "math", "strict": True, "answer": 7}
    assert problem.messages[0] == {"role": "system", "content": "Be brief."}
    assert problem.metadata == {"level": 3}
    assert problem.id == "p-0"


GOOD = {"prompt": "p", "answer": "1"}
BAD = [
    ({"answer": "1"}, r"line 3: neither 'messages' nor 'prompt'"),
    ({"promt": "p"}, r"did you mean 'promt'"),
    ({"messages": [{"role": "usr", "content": "x"}]}, r"line 3: 'messages': message 1 has the role 'usr'"),
    ({"messages": []}, r"line 3: 'messages' is empty"),
    ({**GOOD, "effort": "lo"}, r"line 3: 'effort' is 'lo', not an effort; did you mean 'low'"),
    ({**GOOD, "budget_tokens": -3}, r"line 3: 'budget_tokens' is -3"),
    ({**GOOD, "budget_tokens": "many"}, r"line 3: 'budget_tokens' is 'many'"),
    ({**GOOD, "tools": "{"}, r"line 3: 'tools' is text but not JSON"),
    ({**GOOD, "id": 1.5}, r"line 3: 'id' is a float"),
    ([1], r"line 3: a row is a mapping"),
    ({**GOOD, "id": "p-0"}, r"line 3: the id 'p-0' is that of .*line 1 too"),
    ({**GOOD, "reward": {"x": 1}}, r"line 3: no reward"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_named_by_file_and_line(tmp_path, row, message):
    path = write_jsonl(tmp_path / "p.jsonl", [GOOD])
    with open(path, "a") as file:
        file.write("\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        load(type="jsonl", path=path, reward="math")


def test_other_bad_inputs(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(UserError, match="p.jsonl line 2: not JSON"):
        load(type="jsonl", path=str(path), reward="math")
    with pytest.raises(UserError, match="line 1: no reward"):
        load(type="jsonl", path=str(path))
    with pytest.raises(UserError, match="no data file"):
        load(type="jsonl", path=str(tmp_path / "none.jsonl"))
    path.write_text("\n")
    with pytest.raises(UserError, match="has no rows"):
        load(type="jsonl", path=str(path), reward="math")
    pq.write_table(pa.table({"question": ["q"]}), tmp_path / "p.parquet")
    with pytest.raises(UserError, match="no column 'questin'; did you mean 'question'"):
        load(type="parquet", path=str(tmp_path / "p.parquet"), reward="m", columns={"prompt": "questin"})
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="bad.parquet: not a readable Parquet file"):
        load(type="parquet", path=str(tmp_path / "bad.parquet"), reward="m")
    with pytest.raises(UserError, match="no task 'chain_sun'; did you mean 'chain_sum'"):
        load(type="reasoning_gym", tasks="chain_sun")
    with pytest.raises(UserError, match="refuses its config"):
        load(type="reasoning_gym", tasks={"name": "chain_sum", "config": {"min_term": 1}})
    with pytest.raises(UserError, match="did you mean 'keyboard_walk'"):
        load(type="callable", function="k3rl.data.tasks:keybord_walk")
    with pytest.raises(UserError, match="no module 'k3rl.data.nothing'"):
        load(type="callable", function="k3rl.data.nothing:f")
    with pytest.raises(ValidationError, match="shares"):
        load(type="callable", function="k3rl.data.tasks:keyboard_walk", efforts={"low": -1})


def test_a_function_in_a_plain_file_gives_problems(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rows(n):\n    for i in range(n):\n        yield {'prompt': str(i), 'answer': i}\n"
        "def wrong():\n    return 3\ndef fails():\n    raise KeyError('k')\n"
    )
    name = str(tmp_path / "mine.py")
    source = load(type="callable", function=f"{name}:rows", arguments={"n": 5}, reward="exact", limit=3)
    assert [p.id for p in source] == ["rows-0", "rows-1", "rows-2"]
    with pytest.raises(UserError, match="returned a int"):
        load(type="callable", function=f"{name}:wrong", reward="exact")
    with pytest.raises(UserError, match="KeyError"):
        load(type="callable", function=f"{name}:fails", reward="exact")


def test_reasoning_gym_problems_are_the_generators_own(tmp_path):
    import reasoning_gym

    source = load(
        type="reasoning_gym",
        tasks=["gcd", {"name": "chain_sum", "config": {"max_terms": 3}, "size": 4}],
        size=6,
        seed=11,
        instruction="Number only.",
        extract="last_number",
        domain="math",
    )
    assert len(source) == 10
    expected = reasoning_gym.create_dataset("chain_sum", max_terms=3, seed=11, size=4)[2]
    problem = source[8]
    assert problem.messages[0]["content"] == expected["question"] + "\n\nNumber only."
    assert problem.reward["answer"] == expected["answer"]
    assert problem.reward["name"] == "reasoning_gym"
    assert problem.domain == "math"
    assert len({p.id for p in source}) == 10


def test_train_and_held_out_partition_and_equal_content_stays_together(tmp_path):
    rows = [{"id": f"p{i}", "prompt": f"what is {i % 400}?", "answer": i % 400} for i in range(600)]
    config = {"type": "jsonl", "path": write_jsonl(tmp_path / "p.jsonl", rows), "reward": "exact"}
    for rule in ("content", "id", "last"):
        parts = {
            part: load(**config, split={"part": part, "held_out": 0.2, "rule": rule})
            for part in ("train", "held_out")
        }
        ids = [p.id for source in parts.values() for p in source]
        assert len(ids) == 600 == len(set(ids))
        assert 60 < len(parts["held_out"]) < 180
    texts = [
        {p.messages[0]["content"] for p in load(**config, split={"part": part, "held_out": 0.2})}
        for part in ("train", "held_out")
    ]
    assert not texts[0] & texts[1]


def test_mix_concatenates_and_refuses_shared_ids(tmp_path):
    rows = [{"id": f"row-{i}", "prompt": str(i), "answer": i} for i in range(3)]
    own = {"type": "jsonl", "path": write_jsonl(tmp_path / "p.jsonl", rows), "reward": "exact"}
    gym = {"type": "reasoning_gym", "tasks": "gcd", "size": 2, "efforts": {"max": 1}}
    source = load(type="mix", sources=[own, gym])
    assert [p.id for p in source] == [f"row-{i}" for i in range(3)] + ["gcd-0-0", "gcd-0-1"]
    assert source.efforts(0) == {}
    assert source.efforts(4) == {Effort.MAX: 1}
    with pytest.raises(UserError, match="sources 1 and 2 of the mix both have"):
        load(type="mix", sources=[own, own])


def test_every_effort_expands_problems_without_their_own(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "effort": "low"}]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    source = load(type="jsonl", path=path, reward="exact", efforts={"low": 1, "high": 0, "max": 2})
    assert [(p.id, p.effort) for p in every_effort(source)] == [
        ("p-0", Effort.LOW),
        ("p-0", Effort.MAX),
        ("p-1", Effort.LOW),
    ]


def test_conversations_need_an_assistant(tmp_path):
    good = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "effort": "max",
    }
    path = write_jsonl(tmp_path / "c.jsonl", [good, {"prompt": "q"}])
    with pytest.raises(UserError, match="line 2: no assistant message"):
        load_conversations(ADAPTER.validate_python({"type": "jsonl", "path": path}))
    source = load_conversations(ADAPTER.validate_python({"type": "jsonl", "path": path, "limit": 1}))
    assert source[0].effort is Effort.MAX
