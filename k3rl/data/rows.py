"""Tables of rows with random access: JSONL by byte offsets, Parquet and `datasets` by Arrow. Each row knows
its place."""

from __future__ import annotations

import glob
import itertools
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from k3rl.data.config import CallableData, DatasetsData, JsonlData, ParquetData, RowsConfig
from k3rl.data.functions import find_object
from k3rl.errors import UserError


class Rows(Protocol):
    """Rows that can be read in any order. ``where(i)`` is the row's place, for messages to people."""

    name: str

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any: ...

    def where(self, index: int) -> str: ...

    def columns(self) -> list[str] | None:
        """Names of the columns, where every row has the same."""


def matching_files(pattern: str) -> list[Path]:
    """Files that a path or glob pattern names, sorted. Raises `UserError` where there is none."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    if not found:
        raise UserError(f"there is no data file '{pattern}'")
    return found


class JsonlRows:
    """JSON lines; only line offsets are kept in memory. Empty lines are passed over."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.name = files[0].stem
        self.files = list(files)
        self.offsets, self.lines = array("q"), array("q")
        self.starts: list[int] = []  # index of each file's first row
        for path in self.files:
            self.starts.append(len(self.offsets))
            offset = 0
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self.offsets.append(offset)
                        self.lines.append(number)
                    offset += len(line)

    def __len__(self) -> int:
        return len(self.offsets)

    def _file(self, index: int) -> Path:
        return self.files[bisect_right(self.starts, index) - 1]

    def where(self, index: int) -> str:
        return f"{self._file(index)} line {self.lines[index]}"

    def row(self, index: int) -> Any:
        with self._file(index).open("rb") as file:
            file.seek(self.offsets[index])
            line = file.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            raise UserError(f"{self.where(index)}: not JSON ({error})") from error

    def columns(self) -> None:
        return None


class ArrowRows:
    """Rows of Parquet files, kept as Arrow columns."""

    def __init__(self, files: Sequence[Path]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.name = files[0].stem
        self.files = list(files)
        tables = []
        for path in self.files:
            try:
                tables.append(pq.read_table(path, memory_map=True))
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{path}: not a readable Parquet file ({error})") from error
        self.starts = [0, *itertools.accumulate(len(t) for t in tables)][:-1]
        try:
            self.table = pa.concat_tables(tables, promote_options="default")
        except pa.ArrowException as error:
            raise UserError(
                f"the files of '{files[0]}' and its neighbours differ in columns: {error}"
            ) from error

    def __len__(self) -> int:
        return len(self.table)

    def where(self, index: int) -> str:
        file = bisect_right(self.starts, index) - 1
        return f"{self.files[file]} row {index - self.starts[file]}"

    def row(self, index: int) -> Any:
        return self.table.slice(index, 1).to_pylist()[0]

    def columns(self) -> list[str]:
        return list(self.table.column_names)


class DatasetRows:
    """A map-style data set of the `datasets` library."""

    def __init__(self, config: DatasetsData) -> None:
        import datasets

        self.name = Path(config.path).name
        self.config = config
        try:
            if (Path(config.path) / "dataset_info.json").exists() or (
                Path(config.path) / "dataset_dict.json"
            ).exists():
                loaded = datasets.load_from_disk(config.path)
                data = loaded[config.data_split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                data = datasets.load_dataset(
                    config.path, config.name, split=config.data_split, revision=config.revision
                )
        except Exception as error:  # the library raises many kinds; each is the user's data, hub or network
            reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise UserError(
                f"the data set '{config.path}' (split '{config.data_split}') cannot be loaded: "
                f"{type(error).__name__}: {reason}"
            ) from error
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def where(self, index: int) -> str:
        return f"data set '{self.config.path}' split '{self.config.data_split}' row {index}"

    def row(self, index: int) -> Any:
        return self.data[index]

    def columns(self) -> list[str]:
        return list(self.data.column_names)


class CallableRows:
    """What a function returned: kept as it is where it can be indexed, else listed."""

    def __init__(self, config: CallableData) -> None:
        self.name = config.function.rpartition(":")[2].rpartition(".")[2]
        self.function = config.function
        function = find_object(config.function)
        if not callable(function):
            raise UserError(f"'{config.function}' is not a function but a {type(function).__name__}")
        try:
            result = function(**config.arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"'{config.function}' failed: {type(error).__name__}: {error}") from error
        if not isinstance(result, Iterable) or isinstance(result, str | bytes | dict):
            raise UserError(
                f"'{config.function}' returned a {type(result).__name__}, not problems or rows in a list"
            )
        indexable = hasattr(result, "__len__") and hasattr(result, "__getitem__")
        self.items = result if indexable else list(itertools.islice(result, config.limit))

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def where(self, index: int) -> str:
        return f"item {index} of '{self.function}'"

    def row(self, index: int) -> Any:
        return self.items[index]  # type: ignore[index]

    def columns(self) -> None:
        return None


def open_rows(config: RowsConfig) -> Rows:
    """The rows that a config names. Raises `UserError` where they cannot be opened, or are none."""
    rows: Rows
    match config:
        case JsonlData():
            rows = JsonlRows(matching_files(config.path))
        case ParquetData():
            rows = ArrowRows(matching_files(config.path))
        case DatasetsData():
            rows = DatasetRows(config)
        case CallableData():
            rows = CallableRows(config)
        case _:
            raise TypeError(f"{type(config).__name__} has no rows")
    if not len(rows):
        raise UserError(f"the data source '{rows.name}' has no rows")
    return rows
