"""The documentation says what the code does: generated pages are current, warnings lead to a row, configs are valid."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from k3rl.tracking.health import RANGES, anchor, check

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmarks_page_is_what_the_results_say():
    made = script("benchmarks_page").page()
    assert (DOCS / "benchmarks.md").read_text() == made, "run: python scripts/benchmarks_page.py"


def test_every_row_of_every_result_is_on_the_benchmarks_page(tmp_path):
    page = script("benchmarks_page")
    (tmp_path / "x.cpu.json").write_text(
        '{"name": "x_y", "machine": "cpu", "versions": {"torch": "2"}, "command": "python benchmarks/x.py --a|b",'
        ' "rows": [{"metric": "speed|s", "value": 12345.6, "unit": "tokens/s", "peer": "p", "peer_value": 0.5,'
        ' "ratio": 24691.2, "seeds": 3}, {"metric": "tiny", "value": 1.5e-7, "unit": "relative"}]}'
    )
    text = page.page(tmp_path)
    assert "| speed\\|s | 12,346 | tokens/s | p | 0.5 | 24,691 | 3 |" in text
    assert "| tiny | 1.500e-07 | relative |  |  |  |  |" in text
    assert text.count("`python benchmarks/x.py --a|b`") == 2
    (tmp_path / "bad.cpu.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"bad\.cpu\.json: no command, machine, rows, versions"):
        page.page(tmp_path)


def test_the_config_reference_has_every_key_and_no_dead_link():
    made = script("config_page")
    models = made.reachable(made.models_of(made.Job))
    assert {"RlJob", "RolloutConfig", "K25Config", "MuonConfig", "JsonlData"} <= {m.__name__ for m in models}
    text = made.page()
    anchors = set(re.findall(r'<a id="(\w+)">', text))
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= anchors
    undocumented = [
        f"{m.__name__}.{name}"
        for m in models
        for name, field in m.model_fields.items()
        if not field.description and name not in ("kind", "type")
    ]
    assert undocumented == []
    rollout = text.partition('<a id="rolloutconfig">')[2].partition("<a id=")[0]
    assert "| `lambda` | number, > 0, ≤ 1 | `0.75` | λ:" in rollout
    assert "| `groups` | whole number, ≥ 1 | **required** |" in rollout


def test_the_command_reference_has_every_command():
    text = script("cli_page").page()
    for command in ("run CONFIG [OVERRIDES...]", "view RUN...", "config show CONFIG", "rewards test"):
        assert f"`k3rl {command}" in text, command


def test_every_warning_leads_to_a_row_and_to_a_symptom():
    metrics, symptoms = (DOCS / "metrics.md").read_text(), (DOCS / "troubleshooting.md").read_text()
    for name, healthy in RANGES.items():
        rows = [r for r in metrics.splitlines() if f'<a id="{anchor(name)}"></a>' in r]
        assert [r[:2] for r in rows] == ["| "], name
        assert f"metrics.md#{anchor(name)}" in symptoms, name
        (line,) = check({name: healthy.low - 1})
        assert line.endswith(f"(docs/metrics.md#{anchor(name)})")


def fenced(language: str) -> list[tuple[str, dict[str, Any]]]:
    """Fenced blocks of a language over all pages: place, and the parsed YAML."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        for match in re.finditer(rf"^[ ]*```{language}[^\n]*\n(.*?)^[ ]*```", page.read_text(), re.M | re.S):
            found.append((f"{page.name}: {match[1].splitlines()[0]}", yaml.safe_load(match[1])))
    return found


def test_every_whole_job_that_is_shown_is_valid():
    from k3rl.config.load import validate

    whole = [(place, job) for place, job in fenced("yaml") if isinstance(job, dict) and "name" in job]
    assert len(whole) >= 7
    for place, job in whole:
        if "kind" in job:
            validate(job, {}, default_origin=place)


def test_every_data_source_that_is_shown_is_valid():
    from pydantic import TypeAdapter

    from k3rl.data.config import DataConfig

    shown = [d["data"] for _, d in fenced("yaml") if isinstance(d, dict) and set(d) == {"data"}]
    assert len(shown) >= 5
    for data in shown:
        TypeAdapter(DataConfig).validate_python(data)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "reference" / "config" / "index.html").exists()
