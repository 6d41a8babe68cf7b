"""Read-only SQL over the viewer's tables, for questions that the filter language cannot ask.

A query passes three gates: it parses as one SELECT; its syntax tree names none but the viewer's tables and no function
that reads files; it runs in a read-only transaction, for a limited time, on a database that may touch no files but the
runs' anyway.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import duckdb

from k3rl.errors import UserError, nearest
from k3rl.viewer.index import Index, as_json

TABLES = {
    "everything": "a row a rollout: all columns of the other three",
    "rollouts": "the stored columns, and those of its group",
    "derived": "by rid: what is computed from a rollout's tokens",
    "notes": "what people wrote",
}
LIMIT_S = 10.0
_FUNCTIONS = {"range", "generate_series", "unnest"}
_MOST_ROWS = 10_000


def query(index: Index, text: str, limit: int = 1000, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Columns and at most ``limit`` rows. Raises `UserError` where it is no SELECT over `TABLES`, or takes too long."""
    text = text.strip().rstrip(";").strip()
    limit = max(1, min(limit, _MOST_ROWS))
    cursor = index.cursor()
    began = time.monotonic()
    timer = threading.Timer(limit_s, cursor.interrupt)
    try:
        _check(cursor, text)
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        timer.start()
        found = cursor.execute(f"SELECT * FROM (\n{text}\n) LIMIT {limit + 1}")
        columns = [{"name": c[0], "type": str(c[1])} for c in found.description]
        rows = found.fetchall()
    except duckdb.InterruptException:
        raise UserError(f"sql: it took longer than {limit_s:g} s and was stopped") from None
    except duckdb.Error as error:
        raise UserError(f"sql: {_first_line(error)}") from error
    finally:
        timer.cancel()
        cursor.close()
    return {
        "columns": columns,
        "rows": as_json(rows[:limit]),
        "truncated": len(rows) > limit,
        "seconds_s": round(time.monotonic() - began, 4),
    }


def _check(cursor: duckdb.DuckDBPyConnection, text: str) -> None:
    if not text:
        raise UserError("sql: it is empty")
    statements = cursor.extract_statements(text)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise UserError("sql: it should be one SELECT and nothing else")
    row = cursor.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()
    tree = json.loads(row[0]) if row else {"error": True}
    if tree.get("error"):
        raise UserError(f"sql: {tree.get('error_message', 'it should be one SELECT and nothing else')}")
    _check_tree(tree, _names_of_parts(tree))


def _names_of_parts(tree: Any) -> set[str]:
    """Names that WITH gives to parts of the query."""
    found: set[str] = set()
    for node in _nodes(tree):
        entries = node.get("cte_map", {}).get("map", ()) if isinstance(node.get("cte_map"), dict) else ()
        found |= {str(entry.get("key", "")).lower() for entry in entries}
        if node.get("type") in ("CTE_NODE", "RECURSIVE_CTE_NODE"):
            found.add(str(node.get("cte_name", "")).lower())
    return found - {""}


def _check_tree(tree: Any, parts: set[str]) -> None:
    for node in _nodes(tree):
        kind = node.get("type")
        if "class" in node:  # an expression
            continue
        if kind == "SHOW_REF":
            raise UserError("sql: DESCRIBE and SHOW are not for here; /api/columns lists all columns")
        if kind == "BASE_TABLE":
            path = node.get("qualified_name", {}).get("path", [])
            name = str(node.get("table_name", ""))
            qualified = node.get("schema_name") or node.get("catalog_name") or len(path) > 1
            if qualified or name.lower() not in {*TABLES, *parts}:
                raise UserError(f"sql: there is no table '{'.'.join(path) or name}'{nearest(name, TABLES)}")
        if kind == "TABLE_FUNCTION":
            name = str(node.get("function", {}).get("function_name", "")).lower()
            if name not in _FUNCTIONS:
                raise UserError(f"sql: the table function '{name}' is not allowed here")


def _nodes(tree: Any) -> Any:
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)


def _first_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
