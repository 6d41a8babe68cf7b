"""Writes docs/benchmarks.md from benchmarks/results/*.json. Nothing on that page is typed by hand.

python scripts/benchmarks_page.py            # writes the page
python scripts/benchmarks_page.py --check    # exit code 1 where the page is not what it would write
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = {
    "cpu": "two CPU cores",
    "h200": "one NVIDIA H200",
    "h200x2": "two NVIDIA H200",
    "h200x4": "four NVIDIA H200",
    "h200x8": "eight NVIDIA H200",
}
KNOWN = {"metric", "value", "unit", "peer", "peer_value", "ratio"}
IN_THE_METRIC = {"gpus", "lambda", "N", "K", "model", "resume", "what"}
"""Keys for programs; the metric says the same in words."""

HEAD = """# Benchmarks

Made by `python scripts/benchmarks_page.py` from `benchmarks/results/*.json`. A peer is measured in the same run
on the same machine unless its name says *published*. Ratio: how many times better than the peer; below 1 the
peer is better.
"""


def page(results: Path = RESULTS) -> str:
    """The whole page. Raises `ValueError` naming a file that lacks what a result must have."""
    found = [load(path) for path in sorted(results.glob("*.json"))]
    overview = [row(["benchmark", "machine", "rows", "command"]), row(["---", "---", "---:", "---"])]
    for result in found:
        link = f"[{result['name']}](#{anchor(result)})"
        overview.append(row([link, machine(result), str(len(result["rows"])), code(result["command"])]))
    return "\n".join([HEAD, *overview, "", *(section(r) for r in found)])


def load(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(encoding="utf-8"))
    missing = {"name", "machine", "versions", "command", "rows"} - result.keys()
    if missing:
        raise ValueError(f"{path.name}: no {', '.join(sorted(missing))}")
    return result


def section(result: dict[str, Any]) -> str:
    """One result file: what was measured, with what, and its rows."""
    lines = [f'## <a id="{anchor(result)}"></a>{result["name"]}, {machine(result)}', "", about(result), ""]
    lines += [f"Command: {code(result['command'])}  ", f"Versions: {facts(result['versions'])}"]
    if result.get("setting"):
        lines += ["  ", f"Setting: {facts(result['setting'])}"]
    others = sorted({k for r in result["rows"] for k in r} - KNOWN - IN_THE_METRIC)
    lines += ["", row(["what", "value", "unit", "peer", "its value", "ratio", *map(words, others)])]
    lines.append(row(["---", "---:", "---", "---", "---:", "---:", *["---"] * len(others)]))
    for r in result["rows"]:
        cells = [r["metric"], number(r["value"]), r.get("unit", ""), r.get("peer") or ""]
        cells += [number(r.get("peer_value")), number(r.get("ratio"), 3)]
        lines.append(row([escape(c) for c in [*cells, *(value(r.get(k)) for k in others)]]))
    return "\n".join([*lines, ""])


def about(result: dict[str, Any]) -> str:
    """First sentences of the benchmark's docstring."""
    source = next(ROOT.glob(f"benchmarks/**/{script(result)}.py"), None)
    if source is None:
        return ""
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def script(result: dict[str, Any]) -> str:
    """Name of the program that the command runs."""
    found = re.search(r"(\w+)\.py", result["command"])
    return found.group(1) if found else result["name"]


def machine(result: dict[str, Any]) -> str:
    return MACHINES.get(result["machine"], result["machine"])


def anchor(result: dict[str, Any]) -> str:
    return f"{result['name']}-{result['machine']}".replace("_", "-")


def facts(mapping: dict[str, Any]) -> str:
    return ", ".join(f"{words(k)} {value(v)}" for k, v in mapping.items())


def words(name: str) -> str:
    return escape(name.replace("_", " "))


def value(x: Any) -> str:
    if x is None:
        return ""
    if isinstance(x, list):
        return ", ".join(map(value, x))
    if isinstance(x, dict):
        return "; ".join(f"{words(k)} {value(v)}" for k, v in x.items())
    return number(x) if isinstance(x, float) else str(x)


def number(x: float | int | None, digits: int = 4) -> str:
    """Four significant digits, no exponent where a person can read it without."""
    if x is None:
        return ""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return str(x)
    if x == 0 or abs(x) >= 10 ** (digits - 1):
        return f"{x:,.0f}"
    return f"{x:.{digits}g}" if abs(x) >= 1e-4 else f"{x:.{digits - 1}e}"


def code(text: str) -> str:
    return f"`{text}`"


def escape(text: str) -> str:
    return str(text).replace("|", "\\|")


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/benchmarks.md is not what benchmarks/results say: python scripts/benchmarks_page.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
