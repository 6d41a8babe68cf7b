"""Files that other people's programs wrote, opened like runs."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from fastapi.testclient import TestClient
from viewer_runs import write_run

from k3rl.errors import UserError
from k3rl.viewer.server import make_app
from k3rl.viewer.session import Session

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture
def opened():
    sessions = []

    def open_(*paths: Path) -> TestClient:
        session = Session(list(paths))
        sessions.append(session)
        session.read_all()
        client = TestClient(make_app(session), base_url="http://localhost")
        client.session = session
        return client

    yield open_
    for session in sessions:
        session.__exit__(None, None, None)


def lines(path: Path, *records: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def rows_of(client: TestClient, **parameters) -> list[dict]:
    reply = client.get("/api/rollouts", params={"sort": "draw", "limit": 1000, **parameters})
    assert reply.status_code == 200, reply.text
    return reply.json()["rows"]


def whole(client: TestClient, row: dict) -> dict:
    reply = client.get("/api/rollout", params={k: row[k] for k in ("run", "step", "draw", "sample")})
    assert reply.status_code == 200, reply.text
    return reply.json()


def troubles(client: TestClient) -> dict[str, str]:
    return {b["file"]: b["reason"] for r in client.get("/api/state").json()["runs"] for b in r["broken"]}


def verifiers_record(example: int, answer: str, reward: float, **more) -> dict:
    return {
        "example_id": example,
        "prompt": QUESTION,
        "completion": [{"role": "assistant", "content": f"It is {answer}.", "reasoning_content": "I add."}],
        "task": "sums",
        "answer": "4",
        "info": {"level": 3},
        "reward": reward,
        "metrics": {"exact": reward, "format": 1.0},
        "exact": reward,
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": "has_final_env_response",
        "token_usage": {"input_tokens": 20.0, "output_tokens": 7.0},
        "timing": {"total_ms": 12.5},
        **more,
    }


def test_verifiers_results_are_groups_with_rewards(opened, tmp_path):
    file = lines(
        tmp_path / "results.jsonl",
        verifiers_record(7, "4", 1.0),
        verifiers_record(9, "4", 1.0),
        verifiers_record(7, "5", 0.0),
        verifiers_record(9, "", 0.0, is_truncated=True),
        verifiers_record(
            9, "", 0.0, error={"error": "ToolError", "error_chain_str": "it broke"}, completion=None
        ),
    )
    (tmp_path / "metadata.json").write_text(json.dumps({"env_id": "sums", "model": "m"}))
    client = opened(file)
    assert troubles(client) == {}
    rows = rows_of(client)
    assert [(r["problem_id"], r["draw"], r["sample"]) for r in rows] == [
        ("7", 0, 0),
        ("7", 0, 1),
        ("9", 1, 0),
        ("9", 1, 1),
        ("9", 1, 2),
    ]
    assert [r["reward"] for r in rows] == [1, 0, 1, 0, 0]
    assert [r["status"] for r in rows] == ["complete", "complete", "complete", "truncated", "failed"]
    assert rows[0]["reward_components"] == {"exact": 1.0, "format": 1.0}
    assert (rows[0]["domain"], rows[0]["answer"], rows[0]["sampled_tokens"], rows[0]["turns"]) == (
        "sums",
        "4",
        7,
        1,
    )
    assert rows[0]["stop_reason"] == "has_final_env_response"
    assert json.loads(rows[0]["info"]) == {"level": 3}
    assert rows[0]["group_reward_std"] == 0.5
    first = whole(client, rows[0])
    assert first["texts"]["content"] == "It is 4."
    assert first["texts"]["reasoning"] == "I add."
    assert first["traces"]["messages"] == QUESTION
    assert first["traces"]["turns"][0]["content"] == "It is 4."
    assert [r["draw"] for r in rows_of(client, filter='component.exact = 1 and text ~ "it is"')] == [0, 1]
    assert len(rows_of(client, filter='exact = 0 and answer = "4"')) == 3
    group = client.get("/api/group", params={"run": rows[0]["run"], "step": 0, "draw": 1}).json()
    assert len(group["samples"]) == 3
    cells = client.get("/api/cells", params={"run": rows[0]["run"]}).json()["cells"]
    assert [(c["domain"], c["rollouts"]) for c in cells] == [("sums", 5)]


def test_a_folder_of_evaluations_is_a_run_each(opened, tmp_path):
    for model in ("a", "b"):
        lines(tmp_path / "evals" / f"sums--{model}" / "results.jsonl", verifiers_record(1, "4", 1.0))
    client = opened(tmp_path / "evals")
    assert {r["run"] for r in rows_of(client)} == {"sums--a", "sums--b"}


def test_prime_rl_rollouts_have_their_steps_and_tokens(opened, tmp_path):
    def trace(step: int, reward: float) -> dict:
        return {
            "id": f"t{step}",
            "task": {"type": "Sums", "data": {}, "key": "sum-1"},
            "nodes": [
                {
                    "parent": None,
                    "message": QUESTION[1],
                    "token_ids": [1, 2, 3],
                    "mask": [False] * 3,
                    "logprobs": [],
                },
                {
                    "parent": 0,
                    "sampled": True,
                    "message": {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "1", "name": "add"}],
                    },
                    "token_ids": [4, 5, 6],
                    "mask": [False, True, True],
                    "logprobs": [-0.5, -0.25],
                },
                {"parent": 1, "message": {"role": "tool", "content": "4"}, "token_ids": [7], "mask": [False]},
                {
                    "parent": 2,
                    "sampled": True,
                    "message": {"role": "assistant", "content": "4"},
                    "token_ids": [8],
                    "mask": [True],
                    "logprobs": [-1.0],
                },
            ],
            "rewards": {"exact": {"score": reward, "weight": 2.0}, "style": {"score": 1.0, "weight": 0.5}},
            "info": {"prime_rl": {"env_name": "sums"}},
        }

    for step in (0, 10, 2):
        lines(
            tmp_path / "out" / "rollouts" / f"step_{step}" / "train_rollouts.jsonl",
            trace(step, 1.0),
            trace(step, 0),
        )
    client = opened(tmp_path / "out")
    assert troubles(client) == {}
    rows = rows_of(client, sort="step")
    assert {r["run"] for r in rows} == {"out"}
    assert [(r["step"], r["sample"]) for r in rows] == [(0, 0), (0, 1), (2, 0), (2, 1), (10, 0), (10, 1)]
    assert rows[0]["reward"] == 2.5
    assert rows[0]["reward_components"] == {"exact": 1.0, "style": 1.0}
    assert (rows[0]["problem_id"], rows[0]["domain"], rows[0]["turns"]) == ("sum-1", "sums", 2)
    tokens = whole(client, rows[0])["tokens"]
    assert tokens["ids"] == [5, 6, 7, 8]
    assert tokens["prompt_ids"] == [1, 2, 3, 4]
    assert tokens["logprobs"] == [-0.5, -0.25, None, -1.0]
    assert rows[0]["sampled_tokens"] == 3
    assert len(whole(client, rows[0])["traces"]["turns"]) == 3


def test_messages_in_parquet_and_other_names_for_them(opened, tmp_path):
    conversation = [*QUESTION, {"role": "assistant", "content": "4"}]
    rows = [{"messages": conversation, "score": 0.5, "source": "web", "quality": i} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    lines(
        tmp_path / "more.jsonl",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "Once", "completion": " upon a time", "reward": 1},
        {"instruction": "Say a", "output": "a"},
        {"question": "2 + 2?", "answer": "4"},
        {"messages": json.dumps(conversation)},
    )
    client = opened(tmp_path / "chat.parquet", tmp_path / "more.jsonl")
    assert troubles(client) == {}
    chat = rows_of(client, run="chat.parquet", filter="quality >= 1 and domain = web")
    assert len(chat) == 2
    assert len({r["draw"] for r in chat}) == 1  # one prompt: one group
    assert whole(client, chat[0])["texts"]["content"] == "4"
    more = [whole(client, r) for r in rows_of(client, run="more.jsonl")]
    assert [m["texts"]["response_text"] for m in more] == ["Hello", " upon a time", "a", "4", "4"]
    assert [m["traces"]["messages"][-1]["content"] for m in more][:2] == ["Hi", "Once"]


def test_a_saved_data_set_and_one_with_parts(opened, tmp_path):
    rows = [
        {"messages": [*QUESTION, {"role": "assistant", "content": str(i)}], "reward": float(i)}
        for i in range(4)
    ]
    Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:1])}).save_to_disk(
        tmp_path / "two"
    )
    client = opened(tmp_path / "one", tmp_path / "two")
    assert troubles(client) == {}
    counts = {}
    for row in rows_of(client):
        counts[row["run"]] = counts.get(row["run"], 0) + 1
    assert counts == {"one": 4, "two/train": 4, "two/test": 1}
    assert [r["reward"] for r in rows_of(client, run="one", sort="reward", descending=True)] == [3, 2, 1, 0]


def test_lines_that_cannot_be_read_are_counted_and_the_rest_is_shown(opened, tmp_path):
    file = lines(tmp_path / "bad.jsonl", verifiers_record(1, "4", 1.0), verifiers_record(2, "4", 1.0))
    with open(file, "a") as out:
        out.write('{"prompt": \n[1]\n{"a": 1}\n{}\n')
        out.write(json.dumps(verifiers_record(3, "4", 1.0)) + '\n{"still being wri')
    client = opened(file)
    assert len(rows_of(client)) == 3
    assert list(troubles(client)) == ["bad.jsonl"]
    assert troubles(client)["bad.jsonl"].startswith("line 3: it is not JSON")
    assert troubles(client)["bad.jsonl"].endswith("(and 3 more like it)")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_files_that_hold_anything_else_are_named(opened, tmp_path, name):
    (tmp_path / name).write_bytes(b"\x00\xff PAR1 nothing of the kind\n")
    client = opened(tmp_path / name)
    assert client.get("/api/rollouts").json()["total"] == 0
    assert list(troubles(client)) == [name]
    for address in ("cells", "degeneracies", "configs", "metrics"):
        assert client.get(f"/api/{address}", params={"run": name}).status_code == 200


def test_values_that_fit_no_column_do_no_harm(opened, tmp_path):
    lines(
        tmp_path / "odd.jsonl",
        {
            "prompt": "a",
            "completion": "\ud800 half a pair",
            "reward": "high",
            "step": "x",
            "id": None,
            "Reward": 3,
        },
        {
            "prompt": "b",
            "completion": "c",
            "reward": float("nan"),
            "step": 10**30,
            "extra": 10**400,
            "logprobs": [1],
        },
        {
            "prompt": ["a", 1],
            "completion": {"role": None, "content": [{"type": "image"}, 3]},
            "x": [{}],
            "run": "a",
        },
        {
            "messages": [{"role": "assistant", "tool_calls": [1, None]}],
            "response_ids": [1, 2],
            "logprobs": [0.5],
        },
        {
            "prompt": "a",
            "completion": "b",
            "turns": "many",
            "status": 4,
            "content": "c",
            "fate": "trained",
            "x": 1,
        },
        {"nodes": [{"parent": 0, "message": {"role": "user", "content": "loop"}}]},
    )
    client = opened(tmp_path / "odd.jsonl")
    assert troubles(client) == {}
    rows = rows_of(client)
    assert len(rows) == 6
    assert {r["run"] for r in rows} == {"odd.jsonl"}
    for row in rows:
        whole(client, row)
    assert [r["fate"] for r in rows].count("trained") == 1
    client.get("/api/export", params={"run": "odd.jsonl", "format": "csv"}).raise_for_status()


def test_a_file_that_grows_is_read_again_and_compressed_ones_too(opened, tmp_path):
    file = lines(tmp_path / "grow.jsonl", verifiers_record(1, "4", 1.0))
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as out:
        out.write(json.dumps(verifiers_record(1, "4", 1.0)) + "\n")
    client = opened(file, tmp_path / "packed.jsonl.gz")
    assert len(rows_of(client)) == 2
    with open(file, "a") as out:
        out.write(json.dumps(verifiers_record(2, "4", 1.0)) + "\n")
    for foreign in client.session.sources._foreign.values():
        foreign._next_at = 0
    client.session.read_all()
    assert len(rows_of(client, run="grow.jsonl")) == 2


def test_one_rollout_file_of_a_run_keeps_its_tokenizer(opened, tmp_path):
    write_run(tmp_path / "run", steps=2)
    client = opened(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    rows = rows_of(client)
    assert {r["step"] for r in rows} == {1}
    assert len(rows) == 24
    assert whole(client, rows[0])["tokens"]["decoded"]
    exported = tmp_path / "exported.parquet"
    exported.write_bytes(client.get("/api/export", params={"filter": "reward >= 1"}).content)
    assert len(rows_of(opened(exported))) == len(rows_of(client, filter="reward >= 1")) > 0


def test_a_note_lies_beside_the_file(opened, tmp_path):
    file = lines(tmp_path / "results.jsonl", verifiers_record(1, "4", 1.0))
    client = opened(file)
    row = rows_of(client)[0]
    note = {k: row[k] for k in ("run", "step", "draw", "sample")} | {"flag": "bad", "note": "wrong"}
    client.post("/api/notes", json=note, headers={"X-K3RL": "1"}).raise_for_status()
    assert json.loads((tmp_path / "results.jsonl.notes.jsonl").read_text())["flag"] == "bad"
    assert len(rows_of(client, filter="flag = bad")) == 1
    assert len(rows_of(opened(tmp_path))) == 1  # notes are no data


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"notes\.txt cannot be opened: it should end with one of \.parquet"):
        Session([tmp_path / "notes.txt"])
