"""Tables of delimited text: rows of .csv and .tsv files, and of those that pair an image with a caption.

A quote that is never closed would swallow all lines behind it. Quotes are therefore read strictly, and a row of more
than `ROW_LINES` lines is refused with the number of its first line. The first line of a table of images names the
columns. A .tsv file has tabs and no quoting; a .csv file has commas, or tabs where its first line has one, or
semicolons, and quotes.
"""

import codecs
import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from contrastile._errors import invalid, logger
from contrastile.data.files import open_file

# the most lines of a row, and the most characters of a field
ROW_LINES, FIELD_CHARACTERS = 16, 1 << 20
# the most bytes of a caption, and the reason why a longer one is skipped
LONGEST_CAPTION, TOO_LONG = 1 << 16, "caption over 64 kB"
# names of the columns; the first one that a table has is read
PATH_COLUMNS, CAPTION_COLUMNS = ("filepath", "file_name", "image"), ("title", "text", "caption")

Row = tuple[Path, str]


def read_rows(
    lines: Iterable[str], delimiter: str, path: Path, *, name: str = "source", quotes: bool = True
) -> Iterator[tuple[int, list[str] | str]]:
    """Rows that are not empty, each with the number of its first line; an unusable line gives the reason instead.

    `lines` keep their ends, and have lone surrogates for bytes that are not UTF-8. `name` is what errors call the file.

    >>> list(read_rows(['a,"b\\n', 'c"\\n', '"d" e,f\\n'], ",", Path("x.csv")))
    [(1, ['a', 'b\\nc']), (3, 'broken row')]
    """
    csv.field_size_limit(FIELD_CHARACTERS)
    first, exhausted = 1, False

    def unclosed() -> ValueError:
        remedy = "Close it, or double it where it is a letter; .parquet holds texts of more lines."
        return invalid(name, f"close every quote within {ROW_LINES} lines", f"one open at {path}:{first}", remedy)

    def limited() -> Iterator[str]:
        nonlocal exhausted
        for number, line in enumerate(lines, start=1):
            if number - first >= ROW_LINES:
                raise unclosed()
            yield line
        exhausted = True

    quoting: Any = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    rows = csv.reader(limited(), delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        first = rows.line_num + 1
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error:
            if exhausted:
                raise unclosed() from None
            yield from ((number, "broken row") for number in range(first, rows.line_num + 1))
            continue
        if fields:
            yield first, fields if all(map(is_utf8, fields)) else "not UTF-8"


def read_table(table: Path, folder: Path | None = None, *, name: str = "source") -> list[Row | str]:
    """Every row below the first: the path of its image, in `folder` or the table's, and its caption; or a reason."""
    try:
        with open_file(table) as file:
            content = file.read()
    except OSError as failure:
        rule = 'be "glyphs" or a file that can be read' if name == "source" else "be a file that can be read"
        raise invalid(name, rule, table, f"{failure.strerror}.") from failure
    text, is_csv = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape"), _is_csv(table)
    first = text.partition("\n")[0]
    delimiter = comma(first) if is_csv and "\t" not in first else "\t"
    rows = read_rows(StringIO(text, newline=""), delimiter, table, name=name, quotes=is_csv)
    header = next(rows, (0, ""))[1]
    columns = [] if isinstance(header, str) else folded(header)
    check_names([column for column in columns if column in (*PATH_COLUMNS, *CAPTION_COLUMNS)], table, name=name)
    known = [next((one for one in names if one in columns), None) for names in (PATH_COLUMNS, CAPTION_COLUMNS)]
    if None in known:
        rule = f"have a column {' or '.join(PATH_COLUMNS)} and one {' or '.join(CAPTION_COLUMNS)}"
        separators = "commas, semicolons or tabs" if is_csv else "tabs"
        got = f"{header or 'nothing'} in the first line"
        remedy = "Save it as UTF-8." if header == "not UTF-8" else f"Name them there, separated by {separators}."
        raise invalid(name, rule, got, remedy)
    path_column, caption_column = (columns.index(str(column)) for column in known)

    def row(fields: list[str] | str) -> Row | str:
        if isinstance(fields, str):
            return fields
        if len(fields) != len(columns):
            return "wrong number of columns"
        if "\0" in fields[path_column]:
            return "NUL in a path"
        caption = " ".join(fields[caption_column].split())
        if "\0" in caption or len(caption.encode()) > LONGEST_CAPTION:
            return "not a text" if "\0" in caption else TOO_LONG
        return ((folder or table.parent) / fields[path_column].strip(), caption) if caption else "empty caption"

    # a .tsv file may have lines of blanks
    return [row(fields) for _, fields in rows if is_csv or "".join(fields).strip()]


def _is_csv(table: Path) -> bool:
    return table.suffix.lower() == ".csv"


def comma(first: str) -> str:
    """The mark between the fields of a .csv file: a semicolon where its first line has one and neither comma nor tab.

    Spreadsheets write semicolons where a comma is the decimal mark. Split at commas, such a line is a single name.
    """
    return ";" if ";" in first and not {",", "\t"} & {*first} else ","


def warn_of_quotes(table: Path, rows: Iterable[Row | str]) -> None:
    """Warn where captions of a .tsv file look as if a writer of .csv files had put them into quotes."""
    captions = [row[1] for row in rows if not isinstance(row, str)] if not _is_csv(table) else []
    quoted = sum(caption[:1] == caption[-1:] == '"' and '""' in caption[1:-1] for caption in captions)
    if quoted:
        message = "%s: captions in quotes, with quotes doubled inside: %d; a .tsv file has no quoting, so "
        message += "they are read as letters. Rename it to .csv, which may have tabs too, to have them read as quotes"
        logger.warning(message, table, quoted)


def check_names(names: Sequence[str], path: Path, *, name: str = "source") -> None:
    """Raise ValueError where two columns share a name, because only one of them would be read."""
    twice = [column for column, times in Counter(filter(None, names)).items() if times > 1]
    if twice:
        remedy = "Rename one of them."
        raise invalid(name, "have columns of different names", f'"{twice[0]}" twice in {path}', remedy)


def folded(names: Iterable[str]) -> list[str]:
    """Names as they are compared: in lower case, without blanks around them."""
    return [name.strip().lower() for name in names]


def is_utf8(text: str) -> bool:
    """False for a text with lone surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
