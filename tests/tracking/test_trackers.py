"""Trackers of other people: what they get, and that nothing they do stops or delays a run."""

import json
import logging
import math
import sys
import threading
import time

import pytest

from k3rl.config.jobs import TrackingConfig
from k3rl.store import RunStore
from k3rl.tracking import Tracker
from k3rl.tracking.foreign import FOREIGN, Lane, flat, mlflow_name

METRICS = {"reward/mean": 0.5, "reward/cell/general.low": 0.25, "staleness/share_8_up": 0.0, "odd|name": 1.0}


@pytest.fixture
def store(tmp_path):
    made = RunStore.create(tmp_path / "runs" / "walk", "kind: rl\ntrainer: {grad_clip: 1.0}\n")
    yield made
    made.close()


def lines(store) -> list[dict]:
    return [json.loads(line) for line in (store.path / "metrics.jsonl").read_text().splitlines()]


class Takes:
    """A service that keeps what it gets."""

    def __init__(self, fails_at: int = -1) -> None:
        self.got, self.fails_at, self.closed = [], fails_at, 0

    def log(self, step, metrics):
        if step == self.fails_at:
            raise ConnectionError("the service\nis gone")
        self.got.append((step, metrics))

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("name", FOREIGN)
def test_a_package_that_is_missing_is_one_sentence_and_the_run_goes_on(name, store, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    tracker = Tracker(store, TrackingConfig(**{name: "somewhere"}))
    tracker.log(0, METRICS)
    tracker.close()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == [
        f"tracker {name} needs the package '{name}' (pip install 'k3rl[trackers]') and gets nothing more"
    ]
    assert lines(store)[0]["reward/mean"] == 0.5


def test_all_steps_arrive_in_order_before_the_run_ends():
    service = Takes()
    lane = Lane("service", lambda: service)
    for step in range(50):
        lane.log(step, {"a": float(step)})
    lane.close()
    assert service.got == [(step, {"a": float(step)}) for step in range(50)]
    assert service.closed == 1


def test_the_first_failure_is_the_last_thing_that_is_heard_of_a_tracker(caplog):
    service = Takes(fails_at=2)
    lane = Lane("service", lambda: service)
    for step in range(5):
        lane.log(step, {})
    lane.close()
    lane.log(6, {})
    assert [step for step, _ in service.got] == [0, 1]
    assert [r.getMessage() for r in caplog.records] == [
        "tracker service failed: ConnectionError: the service is gone and gets nothing more"
    ]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), OSError("no route")])
def test_a_tracker_that_does_not_start_stops_nothing(error, caplog):
    def make():
        raise error

    lane = Lane("service", make)
    lane.log(0, {})
    lane.close()
    assert "tracker service did not start: " in caplog.text


def test_a_tracker_that_hangs_delays_neither_steps_nor_for_long_the_end(caplog, monkeypatch):
    monkeypatch.setattr("k3rl.tracking.foreign.HELD_STEPS", 20)
    answer = threading.Event()
    lane = Lane("service", lambda: answer.wait(60))
    began = time.monotonic()
    for step in range(30):
        lane.log(step, {})
    lane.close(0.2)
    assert time.monotonic() - began < 5
    answer.set()
    assert [r.getMessage() for r in caplog.records] == [
        "tracker service has not taken 20 steps and gets nothing more"
    ]


def test_names_and_configs_fit_mlflow():
    assert mlflow_name("reward/cell/a.b|c%") == "reward/cell/a.b_c_"
    assert flat({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == [("a.b", "1"), ("a.c", "{}"), ("d", "[1, 2]")]
    assert len(flat({"long": "x" * 999})[0][1]) == 500


def test_mlflow_gets_every_step_and_a_resumed_run_is_the_same_run(store, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    address = f"file://{tmp_path / 'mlflow'}"
    for first in (0, 2):
        tracker = Tracker(store, TrackingConfig(mlflow=address), first_step=first)
        for step in (first, first + 1):
            tracker.log(step, {**METRICS, "reward/mean": step / 4, "broken": math.nan})
        tracker.close()
    client = mlflow.MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("k3rl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("walk", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["odd_name"] == 1.0
    assert math.isnan(run.data.metrics["broken"])
    assert run.data.params["trainer.grad_clip"] == "1.0"


def test_mlflow_that_cannot_be_reached_stops_nothing(store, caplog, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker(store, TrackingConfig(mlflow="http://127.0.0.1:9"))
    tracker.log(0, METRICS)
    tracker.close()
    assert "tracker mlflow did not start: " in caplog.text
    assert len(lines(store)) == 1


def test_trackio_gets_every_step_and_a_resumed_run_is_the_same_run(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    for first in (0, 2):
        tracker = Tracker(store, TrackingConfig(trackio="walks"), first_step=first)
        for step in (first, first + 1):
            tracker.log(step, {**METRICS, "reward/mean": step / 4})
        tracker.close()
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("walks") == ["walk"]
    rows = SQLiteStorage.get_logs("walks", "walk")
    assert [(r["step"], r["reward/mean"]) for r in rows] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
