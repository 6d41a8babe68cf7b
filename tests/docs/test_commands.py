"""Every command in README and docs is executed, or says why not.

A page's ```bash blocks run in order, in one folder that holds the repository's configs and examples;
```yaml and ```python blocks with a title are saved there under it. Blocks that start jobs or servers are slow without
being marked. What stands in an HTML comment on the line before a block:

    <!-- slow -->                    `make test-slow` runs it
    <!-- fails: 2 -->                it ends with this exit code
    <!-- serves -->                  a server: it is up once it prints its address
    <!-- tested: tests/x.py::name -->   that test does
    <!-- needs: gpu; ... -->         not here: hardware, a network, a cluster
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from k3rl.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = ("configs", "examples", "benchmarks", "scripts", "tests", "docs", ".venv", "mkdocs.yml", "Makefile")
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>bash|yaml|python)(?P<info>[^\n]*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
HEAVY = re.compile(r"\bk3rl (?!config|doctor|--help)(?!\w+ --help)|\b(make|pip|apt-get|python benchmarks)\b")
KINDS = {"run", "slow", "fails", "serves", "tested", "needs"}

# Blocks without a mark of their own: by page and a pattern of their beginning. README's are taken line by line.
KNOWN = {
    "README.md": {
        r"make (demo|test) ": "needs: network; CI runs both",
        r"\.venv/bin/k3rl view runs/": "tested: tests/viewer/test_viewer_browser.py",
        r"\.venv/bin/k3rl view --text|python -c": "slow",
        r"k3rl run configs/(smollm2|distill|qat|grm|agent|quickstart)": "slow",
        r"k3rl export runs/qat_nano": "slow",
        r"k3rl (config|doctor)": "run",
    },
    "rewards.md": {r"": "tested: tests/rewards/test_rewards_doc.py"},
    "distillation.md": {
        r"make recipe": "needs: half an hour; its config is tested in tests/distill/test_distill_jobs.py"
    },
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    info: str
    text: str
    mark: str

    @property
    def kind(self) -> str:
        return re.split(r"[:;]", self.mark)[0].strip()

    @property
    def about(self) -> str:
        return self.mark.partition(":")[2].partition(";")[0].strip()

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def default_mark(text: str) -> str:
    return "slow" if HEAVY.search(text) else "run"


def blocks(page: Path) -> list[Block]:
    text, out = page.read_text(encoding="utf-8"), []
    name = str(page.relative_to(ROOT))
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        block = Block(
            name,
            line,
            match["language"],
            match["info"],
            match["text"],
            match["mark"] or default_mark(match["text"]),
        )
        known = KNOWN.get(page.name, {}) if block.language == "bash" and not match["mark"] else {}
        if known and page.name == "README.md":
            for command in filter(None, (c.strip() for c in block.text.splitlines())):
                found = [m for p, m in known.items() if re.match(p, command)]
                assert found, f"{block.where}: nothing says what becomes of `{command}`"
                out.append(replace(block, text=command + "\n", mark=found[0]))
        elif found := [m for p, m in known.items() if re.match(p, block.text)]:
            out.append(replace(block, mark=found[0]))
        elif block.language == "bash" or "title=" in block.info:
            out.append(block)
    return out


BLOCKS = {str(page.relative_to(ROOT)): blocks(page) for page in PAGES}


def runnable(page: str, *kinds: str) -> bool:
    return any(b.language == "bash" and b.kind in kinds for b in BLOCKS[page])


def furnished(folder: Path) -> Path:
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return furnished(tmp_path)


@pytest.fixture(scope="session")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all pages, so that the quickstart's run is there for those that look at it."""
    return furnished(tmp_path_factory.mktemp("reader"))


OURS = re.compile(r"k3rl [^|<>&;]*?( \| head -\d+)?")


def quickly(block: Block, folder: Path) -> None:
    """As `execute`; blocks of nothing but `k3rl` commands run in this process, where everything is imported already."""
    lines = [" ".join(shlex.split(c, comments=True)) for c in block.text.splitlines()]
    if "title=" in block.info or not all(OURS.fullmatch(c) for c in lines if c):
        execute(block, folder)
        return
    wanted = int(block.about) if block.kind == "fails" else 0
    for line in block.text.splitlines():
        words = shlex.split(line.partition(" | head")[0], comments=True)
        said = io.StringIO()
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(said),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                main()
        assert (ended.value.code or 0) == wanted, f"{block.where}\n{line}\n{said.getvalue()}"


def execute(block: Block, folder: Path) -> None:
    """Run a block as a reader would, in the environment the tests run in."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    if "title=" in block.info:
        (folder / block.info.split('"')[1]).write_text(block.text)
        return
    if block.kind == "serves":
        serve(block, folder, environment)
        return
    # `head` closes its pipe early, which is no failure of the command before it.
    shell = "set -eu\n" if "| head" in block.text else "set -euo pipefail\n"
    done = subprocess.run(
        ["bash", "-c", shell + block.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    wanted = int(block.about) if block.kind == "fails" else 0
    assert done.returncode == wanted, f"{block.where}\n{block.text}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, f"{block.where}\n{done.stderr}"


def serve(block: Block, folder: Path, environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        ["bash", "-c", "exec " + block.text.strip()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        limit, said = time.monotonic() + 60, ""
        while "http://" not in said:
            assert time.monotonic() < limit, f"{block.where}: no address within a minute: {said}"
            assert process.poll() is None, f"{block.where}: ended: {said}{process.stdout.read()}"
            said += process.stdout.readline()
    finally:
        process.terminate()
        process.wait(10)


def test_every_block_says_what_becomes_of_it():
    """Known marks; tests that exist; at least one block that runs."""
    marked = [b for page in BLOCKS.values() for b in page if b.language == "bash"]
    assert sum(b.kind == "run" for b in marked) >= 15
    for block in marked:
        assert block.kind in KINDS, f"{block.where}: unknown mark '{block.mark}'"
        if block.kind == "tested":
            file, _, name = block.about.partition("::")
            assert (ROOT / file).is_file(), f"{block.where}: no file {file}"
            assert not name or f"def {name}(" in (ROOT / file).read_text(), (
                f"{block.where}: no test {block.about}"
            )
        if block.kind == "needs":
            assert block.about, f"{block.where}: needs what?"
        if block.kind == "fails":
            assert block.about.isdigit(), block.where


def test_a_command_that_fails_is_found(folder: Path):
    """The runner itself: a wrong key, a wrong exit code, a failure inside a pipe."""
    for text, mark in [
        ("k3rl config show configs/quickstart.yaml nme=x\n", "run"),
        ("false | cat\n", "run"),
        ("true\n", "fails: 2"),
    ]:
        for run in (execute, quickly):
            with pytest.raises(AssertionError):
                run(Block("x.md", 1, "bash", "", text, mark), folder)


@pytest.mark.parametrize("page", [p for p in BLOCKS if runnable(p, "run", "fails")])
def test_cheap_commands_run(page: str, folder: Path):
    for block in BLOCKS[page]:
        if block.kind in ("run", "fails"):
            quickly(block, folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [p for p in BLOCKS if runnable(p, "slow", "serves")])
def test_all_commands_of_a_page_run_in_order(page: str, one_folder: Path):
    for block in BLOCKS[page]:
        if block.kind in ("run", "fails", "slow", "serves"):
            execute(block, one_folder)
