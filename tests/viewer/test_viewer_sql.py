"""SQL by people who look at a run: what they may ask, and what they may not."""

import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from viewer_runs import write_run

from k3rl.errors import UserError
from k3rl.viewer.server import make_app
from k3rl.viewer.session import Session
from k3rl.viewer.sql import query


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", steps=3)
    (folder / "secret.csv").write_text("a\n1\n")
    session = Session([folder])
    session.read_all()
    yield session
    session.__exit__(None, None, None)


def test_counts_and_means_by_group(session):
    said = query(
        session.index,
        "select domain, count(*) as n, avg(teacher_kl) from everything group by 1 order by n desc;",
    )
    assert [c["name"] for c in said["columns"]][:2] == ["domain", "n"]
    assert sum(row[1] for row in said["rows"]) == 72
    assert not said["truncated"]
    counts = [row[1] for row in said["rows"]]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    "text",
    [
        "with best as (select max(reward) as r from rollouts) select r from best",
        "from rollouts select step where reward > 0 limit 3",
        "select * from (values (1, 'a;b'), (2, 'c'))",
        "select r.step, p.name from rollouts r, unnest(r.reward_components) as t(p) limit 3",
        "with recursive n as (select 1 as i union all select i + 1 from n where i < 4) select sum(i) from n -- four",
        "select a.sample from rollouts a join derived d on a.rid = d.rid where d.duplicates > 0 /* ; drop */",
        "select step, (select count(*) from rollouts i where i.step = o.step) from rollouts o group by step order by 1",
        "select count(*) filter (where reward > 0), any_value(problem_id) from everything group by all order by all",
    ],
)
def test_ordinary_selects_are_answered(session, text):
    assert query(session.index, text)["rows"]


def test_an_order_is_kept_and_more_rows_are_said(session):
    said = query(
        session.index, "select reward from rollouts where reward is not null order by reward desc", limit=10
    )
    rewards = [row[0] for row in said["rows"]]
    assert len(rewards) == 10
    assert said["truncated"]
    assert rewards == sorted(rewards, reverse=True)


FORBIDDEN = [
    "",
    "drop table rollouts",
    "select 1; drop table rollouts",
    "delete from rollouts",
    "insert into notes values ('a', 1, 1, 1, 'x', 'y', 0)",
    "update rollouts set reward = 1",
    "copy rollouts to '{folder}/stolen.csv'",
    "copy (select 1) to '{folder}/stolen.csv'",
    "attach '{folder}/x.db'",
    "install httpfs",
    "set enable_external_access = true",
    "pragma database_list",
    "call pragma_version()",
    "explain analyze select 1",
    "select * from '{folder}/secret.csv'",
    "select * from read_csv('{folder}/secret.csv')",
    "select * from read_text('{folder}/secret.csv')",
    "select (select content from read_text('{folder}/secret.csv'))",
    "with a as (from read_blob('/etc/passwd')) select * from a",
    "select * from glob('/*')",
    "from query('select 1')",
    "from query_table('rollouts')",
    "select * from information_schema.tables",
    "select * from duckdb_settings()",
    "select * from main.rollouts",
    "select * from hits",
    "from (describe rollouts)",
    "select * from rollouts) ; drop table notes; select * from (select 1",
    "select 1 from rollouts limit 1) union select content from read_text('/etc/passwd'",
    "select nonsense from rollouts",
    "selec 1",
]


@pytest.mark.parametrize("text", FORBIDDEN)
def test_anything_else_is_refused_in_one_sentence(session, text):
    folder = session.sources.roots[0]
    with pytest.raises(UserError, match=r"^sql: [^\n]+$"):
        query(session.index, text.format(folder=folder))
    assert not list(Path(folder).glob("stolen*"))
    assert query(session.index, "select count(*) from rollouts")["rows"] == [[72]]


def test_what_takes_too_long_is_stopped(session):
    began = time.monotonic()
    with pytest.raises(UserError, match=r"longer than 0\.5 s"):
        query(session.index, "select sum(a.reward * b.reward * c.step) from rollouts a, rollouts b, rollouts c, "
              "rollouts d, rollouts e, rollouts f", limit_s=0.5)  # fmt: skip
    assert time.monotonic() - began < 10
    assert query(session.index, "select 1")["rows"] == [[1]]


def test_over_http_it_needs_the_viewers_own_header(session):
    with TestClient(make_app(session), base_url="http://localhost") as client:
        body = {"query": "select max(step), 'NaN'::double from rollouts"}
        assert client.post("/api/sql", json=body).status_code == 403
        reply = client.post("/api/sql", json=body, headers={"X-K3RL": "1"})
        assert reply.json()["rows"] == [[2, "NaN"]]
        reply = client.post("/api/sql", json={"query": "drop table notes"}, headers={"X-K3RL": "1"})
        assert reply.status_code == 400
